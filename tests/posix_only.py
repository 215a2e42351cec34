"""Tests of checkpoints, runs and leaves that are about the file system itself; on another store they are left out."""

_BY_REASON = {
    "It is about links, pipes, permissions, URLs or the current folder, or about paths that are no path in a bucket.": (
        "checkpoint/test_hostile.py::test_a_link_for_a_data_file",
        "checkpoint/test_hostile.py::test_a_link_for_an_index",
        "checkpoint/test_hostile.py::test_a_pipe_for_a_data_file_does_not_wait",
        "checkpoint/test_joint_save.py::test_a_link_in_the_place_of_a_step_is_refused_on_all",
        "checkpoint/test_joint_save.py::test_an_overwrite_replaces_all_files",
        "checkpoint/test_load.py::test_links_inside_are_refused",
        "checkpoint/test_load_async.py::test_a_relative_path_is_that_of_the_call",
        "checkpoint/test_paths.py::test_a_current_folder_that_is_gone",
        "checkpoint/test_paths.py::test_a_path_that_cannot_be",
        "checkpoint/test_paths.py::test_a_tilde_elsewhere_is_a_name",
        "checkpoint/test_paths.py::test_nothing_is_made_below_a_folder_called_tilde",
        "checkpoint/test_paths.py::test_a_run_is_not_copied_onto_itself",
        "checkpoint/test_paths.py::test_nothing_is_written_into_its_own_source",
        "checkpoint/test_paths.py::test_the_first_look_at_the_path_fails",
        "checkpoint/test_paths.py::test_the_root_of_the_file_system_is_no_target",
        "checkpoint/test_paths.py::test_what_is_no_path",
        "checkpoint/test_paths.py::test_what_was_saved_is_found_by_the_same_text",
        "checkpoint/test_save.py::test_a_link_to_the_folder",
        "checkpoint/test_save.py::test_files_have_the_rights_that_the_user_gives",
        "checkpoint/test_save.py::test_paths",
        "checkpoint/test_save.py::test_urls_make_no_folders",
        "checkpoint/test_save.py::test_what_is_no_path",
        "checkpoint/test_save_async.py::test_a_relative_path_is_that_of_the_call",
        "checkpoint/test_save_async.py::test_an_error_that_nobody_asked_for_is_raised_by_the_next_call",
        "run/test_branch.py::test_a_damaged_step_begins_no_run",
        "run/test_branch.py::test_a_step_with_its_data_under_a_second_name",
        "run/test_branch.py::test_every_error_leaves_no_run_or_a_whole_one",
        "run/test_branch.py::test_what_a_branch_left_that_died_is_swept_by_the_next",
        "run/test_branch.py::test_without_hard_links_the_bytes_are_copied",
        "run/test_run.py::test_the_folder_of_the_program_may_change",
        "run/test_run_links.py::test_a_link_is_no_step_to_a_run",
        "run/test_run_links.py::test_no_removal_goes_through_a_link",
        "run/test_run_links.py::test_no_write_goes_through_a_link",
        "run/test_run_links.py::test_other_links_to_folders_stay_links",
        "run/test_run_load.py::test_a_missing_step_names_those_that_are_there",
        "run/test_run_steps.py::TestManyAtOnce::test_an_index_is_opened_once_and_not_asked_for_before",
        "run/test_run_steps.py::TestManyAtOnce::test_nothing_is_a_step_that_is_none",
        "run/test_run_steps.py::TestTheDocument::test_hostile_ones",
    ),
    "In a bucket no two files of msgpack have the same bytes; tests/compat/test_msgpack_nonce.py reads them.": (
        "checkpoint/test_convert.py::test_flax_gets_the_bytes_that_it_writes_itself",
        "checkpoint/test_single_files.py::test_flax_reads_ours_and_we_read_flax",
    ),
    "A bucket may hold a file and a folder of one name.": (
        "checkpoint/test_save.py::test_a_file_or_folder_in_the_way",
        "checkpoint/test_save.py::test_a_file_where_a_folder_is_needed",
    ),
    "The lock that ends with its holder proves that a process is dead; in a bucket nothing does.": (
        "checkpoint/test_joint_save.py::test_one_process_alone_sweeps_as_well",
        "checkpoint/test_joint_save.py::test_who_does_not_come_is_named_and_swept_by_the_next_save",
    ),
    "Another process or another library reads or writes the files, or is forked from this one.": (
        "checkpoint/test_load_async.py::test_the_end_of_a_program",
        "checkpoint/test_overlay.py::test_every_form_that_is_read_may_lie_below[orbax]",
        "checkpoint/test_pending.py::test_a_fork_has_nothing_to_do_with_the_saves_of_its_parent",
        "checkpoint/test_save.py::test_processes_with_and_without_x64",
        "checkpoint/test_single_files.py::test_a_renamed_file_is_told_by_its_content",
        "checkpoint/test_structures.py::test_a_program_without_the_libraries_reads_it_all",
        "checkpoint/test_structures.py::test_registered_classes_are_made_again",
        "checkpoint/test_unverified_states.py",
        "checkpoint/test_verify.py::test_a_safetensors_file_of_another_writer",
        "checkpoint/test_verify.py::test_jax_is_not_needed",
    ),
    "It changes times or refuses calls of the system that a bucket does not make.": (
        "checkpoint/test_joint_save.py::test_a_commit_that_fails_is_told_to_all",
        "checkpoint/test_joint_save.py::test_no_other_process_says_that_it_has_written_before_its_names_are_durable",
        "checkpoint/test_verify.py::test_a_file_that_cannot_be_read_in_places",
        "run/test_run_known.py::test_a_removal_that_died_is_finished_by_the_next_program",
        "run/test_run_latest.py::test_a_copy_of_a_run_whose_steps_all_go_has_the_newer_one",
        "run/test_run_latest.py::test_a_step_that_goes_while_it_is_read_has_a_newer_one",
        "run/test_run_latest.py::test_a_verb_takes_the_newer_step_and_names_it",
        "run/test_run_latest.py::test_damage_is_told_at_once",
        "run/test_run_latest.py::test_what_is_missing_for_good_is_told",
        "run/test_run_load.py::test_a_latest_step_that_goes_meanwhile",
        "run/test_run_load.py::test_a_latest_step_that_is_not_found_is_not_looked_for_without_end",
        "run/test_run_steps.py::TestAfterAStep::test_what_cannot_be_removed_is_told_and_the_step_noted",
        "run/test_run_steps.py::TestCollecting::test_a_step_that_somebody_saves_to_is_for_the_next_time",
        "run/test_run_steps.py::TestCollecting::test_one_that_fails_does_not_keep_the_others",
        "run/test_run_steps.py::TestFacts::test_a_checkpoint_that_was_saved_by_hand_counts",
        "run/test_run_steps.py::TestFacts::test_a_step_that_cannot_be_read_now_is_an_error",
        "run/test_run_steps.py::TestFacts::test_a_step_that_was_saved_anew_is_noticed",
        "run/test_run_steps.py::TestReading::test_a_step_that_goes_while_it_is_opened",
    ),
    "It is about what a terminal shows of a save that takes a while.": (
        "checkpoint/test_progress.py::test_a_bar_is_for_terminals_alone",
        "checkpoint/test_progress.py::test_no_line_is_longer_than_the_terminal_is_wide",
    ),
}
_NOT_IN_BUCKETS = {
    "It counts what is read after an opening, which reads the first bytes of an object.": (
        "checkpoint/test_like.py::test_errors_before_anything_is_read",
        "checkpoint/test_open.py::test_a_step_reads_the_blocks_that_hold_an_item",
        "checkpoint/test_selection.py::test_arrays_that_are_left_out_are_not_read",
    ),
    "It compares a disk with memory by itself.": ("checkpoint/test_forms_in_one_folder.py",),
    "An object and objects below it may have one name in a bucket.": (
        "run/test_run.py::test_a_file_is_no_run",
        "run/test_run_left.py::test_what_cannot_be_written_down_leaves_nothing_behind",
        "run/test_run_steps.py::TestAfterAStep::test_a_document_that_cannot_be_written_is_told",
        "run/test_run_steps.py::TestFacts::test_a_file_is_no_run",
    ),
    "In a bucket a damaged index is replaced by a tombstone, and an attempt whose marker cannot be read waits a day.": (
        "run/test_run_steps.py::TestCollecting::test_what_died_is_swept",
        "run/test_run_steps.py::TestRemoving::test_a_damaged_one_is_gone_but_for_its_files",
    ),
    "Which process tells first what differs is up to timing, which is another one here.": (
        "checkpoint/test_signature.py::test_the_first_differences_are_named_with_what_they_are_here",
    ),
    "It refuses calls of the system that a bucket does not make.": (
        "run/test_convert_run.py::test_a_second_call_goes_on_wherever_the_first_one_died",
        "run/test_search.py::test_a_root_that_cannot_be_reached_is_an_error_unless_fallback_does_without_it",
    ),
    "A disk that cannot give bytes back says so of these bytes; a server that does not answer says nothing of them.": (
        "run/test_fallback.py::test_bytes_that_the_disk_refuses_twice_are_damage",
    ),
    "A place in a bucket is never missing, so ``run.json`` is written.": (
        "run/test_run_steps.py::TestFacts::test_where_there_is_no_run",
    ),
}
_LEAVES_ON_DISK = {
    "It looks at the files of a leaves directory, which lie elsewhere in a bucket, or lets another program do so.": (
        "leaves/chunks/test_arrays.py",
        "leaves/chunks/test_pieces.py",
        "leaves/chunks/test_write.py",
        "leaves/folder",
        "leaves/test_any_path.py",
        "leaves/test_bit_rot.py",
        "leaves/test_by_manager.py",
        "leaves/test_foreign.py",
        "leaves/test_index_leaves.py",
        "leaves/test_manager.py",
        "leaves/test_overwritten_meanwhile.py",
        "leaves/test_unmoved.py",
        "leaves/test_unmoved_index.py",
        "leaves/test_verify.py",
        "leaves/test_deserialize.py::test_nothing_there_is_an_error_that_says_what_is",
        "leaves/test_joint.py::test_a_process_that_cannot_write",
        "leaves/test_joint.py::test_compressed_and_cut",
        "leaves/test_joint.py::test_files_of_others_in_the_way_of_any_process",
        "leaves/test_joint.py::test_process_0_cannot_write",
        "leaves/test_joint.py::test_process_0_does_not_come",
        "leaves/test_joint.py::test_staged_files_that_another_saver_swept",
        "leaves/test_joint.py::test_what_is_saved_is_what_one_process_saves",
        "leaves/test_joint.py::test_what_one_process_cannot_save_all_are_told",
        "leaves/test_joint.py::test_who_does_not_come_is_named",
        "leaves/test_prefixes.py::test_a_tree_of_ours_beside_the_golden_ones",
        "leaves/test_prefixes.py::test_eformer_adds_a_tree_to_ours_and_we_to_its",
        "leaves/test_prefixes.py::test_every_prefix_is_a_tree_of_its_own",
        "leaves/test_prefixes.py::test_our_save_replaces_a_tree_of_eformer",
        "leaves/test_prefixes.py::test_trees_side_by_side_are_no_clash",
        "leaves/test_prefixes.py::test_trees_that_would_lie_in_one_another_are_refused",
        "leaves/test_serialize.py::test_a_bare_array_survives",
        "leaves/test_serialize.py::test_a_chunk_is_a_shard",
        "leaves/test_serialize.py::test_a_file_at_the_path_is_an_error_and_stays",
        "leaves/test_serialize.py::test_any_compressor_on_request",
        "leaves/test_serialize.py::test_chunks_are_cut_to_their_limit",
        "leaves/test_serialize.py::test_dtypes_that_tensorstore_lacks_are_raw_ints_to_others",
        "leaves/test_serialize.py::test_files_of_others_in_the_way_are_refused_and_stay",
        "leaves/test_serialize.py::test_no_key_collides_or_leads_out",
        "leaves/test_serialize.py::test_ordinary_keys_and_the_index_are_as_eformer_writes_them",
        "leaves/test_serialize.py::test_paths_of_every_form",
        "leaves/test_serialize.py::test_the_callback_does_not_run_when_the_save_fails",
        "leaves/test_serialize.py::test_the_files_of_the_user_stay",
        "leaves/test_serialize.py::test_what_is_no_local_path_is_refused_and_makes_nothing",
        "leaves/test_target.py::test_a_tree_of_eformers_comes_back_into_its_lists",
    ),
    "A bucket in memory holds what is saved.": (
        "checkpoint/test_saved_parts.py::test_a_cast_of_a_large_leaf_takes_little_memory",
    ),
    "It watches the memory that calls of the system read into.": (
        "leaves/test_batches.py::test_a_batch_is_gone_before_the_next_one_is_read",
    ),
    "It changes a message by a call of the system.": (
        "checkpoint/test_joint_files.py::test_checksums_for_other_chunks_are_refused",
    ),
    "It rebuilds a lost index, which is for directories on disk.": (
        "checkpoint/test_jax_contexts.py::test_every_public_function_does_the_same",
    ),
    "In a bucket the index is there, and lists nothing, as long as a save is not indexed.": (
        "leaves/test_joint.py::test_without_an_index",
    ),
    "The manager of the caller writes arrays by itself, to folders.": (
        "checkpoint/test_aliased.py::test_an_acknowledged_save_loads[leaves, by manager]",
    ),
    "A save with another prefix, committed at the same time, is told to the loser in a bucket.": (
        "leaves/test_serialize.py::test_prefixes_that_are_saved_at_once_never_lose_one_another",
    ),
}
_HOLDING_CONNECTIONS = {
    "The client keeps connections open.": ("checkpoint/test_save.py::test_an_exception_in_progress_leaves_nothing",)
}
_LEFT_OUT = {
    "bucket": _BY_REASON | _NOT_IN_BUCKETS | _LEAVES_ON_DISK,
    "seaweed": _BY_REASON | _NOT_IN_BUCKETS | _LEAVES_ON_DISK | _HOLDING_CONNECTIONS,
}
_BY_NAME = {
    store: {name: reason for reason, names in reasons.items() for name in names} for store, reasons in _LEFT_OUT.items()
}


def why_left_out(test: str, store: str) -> str | None:
    """Return why a test, by file, name and case, does not run on a store; None where it does."""
    name = test.partition("[")[0]
    file = name.partition("::")[0]
    reasons = _BY_NAME[store]
    return next((reasons[one] for one in (test, name, file, file.rpartition("/")[0]) if one in reasons), None)
