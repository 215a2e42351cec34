"""Tests of checkpoints and of runs that are about the file system itself; on another store they are left out."""

import re

_BY_REASON = {
    "It is about links, pipes, permissions, URLs or the current folder, or about paths that are no path in memory.": (
        "checkpoint/test_hostile.py::test_a_link_for_a_data_file",
        "checkpoint/test_hostile.py::test_a_link_for_an_index",
        "checkpoint/test_hostile.py::test_a_pipe_for_a_data_file_does_not_wait",
        "checkpoint/test_joint_save.py::test_an_overwrite_replaces_all_files",
        "checkpoint/test_load.py::test_links_inside_are_refused",
        "checkpoint/test_paths.py::test_a_current_folder_that_is_gone",
        "checkpoint/test_paths.py::test_a_path_that_cannot_be",
        "checkpoint/test_paths.py::test_a_tilde_elsewhere_is_a_name",
        "checkpoint/test_paths.py::test_nothing_is_made_below_a_folder_called_tilde",
        "checkpoint/test_paths.py::test_the_first_look_at_the_path_fails",
        "checkpoint/test_paths.py::test_what_is_no_path",
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
        "run/test_run_load.py::test_a_missing_step_names_those_that_are_there",
        "run/test_run_steps.py::TestTheDocument::test_hostile_ones",
    ),
    "A place in memory may hold a file and a folder of one name, as a bucket may.": (
        "checkpoint/test_save.py::test_a_file_or_folder_in_the_way",
        "checkpoint/test_save.py::test_a_file_where_a_folder_is_needed",
    ),
    "The lock that ends with its holder proves that a process is dead; in memory nothing does.": (
        "checkpoint/test_joint_save.py::test_one_process_alone_sweeps_as_well",
        "checkpoint/test_joint_save.py::test_who_does_not_come_is_named_and_swept_by_the_next_save",
    ),
    "Another process or another library reads or writes the files, or is forked from this one.": (
        "checkpoint/test_pending.py::test_a_fork_has_nothing_to_do_with_the_saves_of_its_parent",
        "checkpoint/test_save.py::test_processes_with_and_without_x64",
        "checkpoint/test_single_files.py::test_a_renamed_file_is_told_by_its_content",
        "checkpoint/test_structures.py::test_a_program_without_the_libraries_reads_it_all",
        "checkpoint/test_structures.py::test_registered_classes_are_made_again",
        "checkpoint/test_verify.py::test_a_safetensors_file_of_another_writer",
        "checkpoint/test_verify.py::test_jax_is_not_needed",
    ),
    "It saves a leaves directory, which needs renames.": (
        "checkpoint/test_jax_contexts.py::test_a_sharding_that_no_array_can_have_is_refused_by_its_leaf",
        "checkpoint/test_jax_contexts.py::test_an_array_of_partial_sums_is_not_saved",
        "checkpoint/test_jax_contexts.py::test_every_public_function_does_the_same",
        "checkpoint/test_joint_files.py::test_checksums_for_other_chunks_are_refused",
        "checkpoint/test_joint_load.py::test_a_timeout_that_makes_no_sense_is_refused_before_anything_is_opened",
        "checkpoint/test_static_fields.py::test_leaves_directories_have_them_too",
        "checkpoint/test_telemetry.py::test_a_load_is_one_line_and_one_event",
        "checkpoint/test_telemetry.py::test_a_save_is_one_line_and_one_event",
    ),
    "It changes times or refuses calls of the system that a store in memory does not make.": (
        "checkpoint/test_joint_save.py::test_a_commit_that_fails_is_told_to_all",
        "checkpoint/test_joint_save.py::test_no_other_process_says_that_it_has_written_before_its_names_are_durable",
        "checkpoint/test_verify.py::test_a_file_that_cannot_be_read_in_places",
        "run/test_run_known.py::test_a_removal_that_died_is_finished_by_the_next_program",
        "run/test_run_latest.py::test_a_step_that_goes_while_it_is_read_has_a_newer_one",
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
_IN_MEMORY_TOO = {
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
    "A place in a bucket is never missing, so ``run.json`` is written.": (
        "run/test_run_steps.py::TestFacts::test_where_there_is_no_run",
    ),
}
_REASONS = {name: reason for reason, names in _BY_REASON.items() for name in names}
_HOLDING_CONNECTIONS = {
    "checkpoint/test_save.py::test_an_exception_in_progress_leaves_nothing": "The client keeps connections open."
}
_NOT_IN_BUCKETS = {name: reason for reason, names in _IN_MEMORY_TOO.items() for name in names}
_CASE_OF_LEAVES = re.compile(r"\[.*\bleaves|\[.*_leaves|\[zstd")


def why_left_out(test: str, store: str) -> str | None:
    """Return why a test, by file, name and case, does not run on a store; None where it does."""
    if _CASE_OF_LEAVES.search(test):
        return "It saves a leaves directory, which needs renames."
    name = test.partition("[")[0]
    more = {"memory": {}, "bucket": _NOT_IN_BUCKETS, "seaweed": _NOT_IN_BUCKETS | _HOLDING_CONNECTIONS}
    return _REASONS.get(name) or more[store].get(name)
