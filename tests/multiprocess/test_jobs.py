"""The jobs that the tests of this folder are made of."""

import os
import signal

import jax

from tests.multiprocess.jobs import hear, results, run_job, say, start_job


def who(offset: int) -> list[int]:
    return [jax.process_index() + offset, jax.process_count(), len(jax.local_devices()), len(jax.devices())]


def waits(word: str) -> str:
    if jax.process_index() == 1 and word == "fail":
        raise ValueError("as asked")
    say("ready")
    return hear()


def test_each_process_knows_its_number_and_its_devices() -> None:
    assert results(run_job(who, 2, devices=[1, 3], arguments=[10])) == [[10, 2, 1, 4], [11, 2, 3, 4]]


def test_what_a_worker_raises_is_told() -> None:
    with start_job(waits, 2, devices=1, arguments=["fail"]) as job:
        job.wait_for(0, "ready")
        job.tell(0, "a word")
        first, second = job.wait()
    assert (first.code, first.result, first.error) == (0, "a word", None)
    assert (second.code, second.result, second.error) == (1, None, "ValueError: as asked")
    assert "as asked" in second.errors


def test_a_process_can_be_ended_while_it_runs() -> None:
    with start_job(waits, 2, devices=1, arguments=["go"], heartbeat=100) as job:
        job.wait_for(1, "ready")
        job.send(1, signal.SIGKILL)
        job.tell(0, "alone")
        first, second = job.wait()
        pids = [job.pid(0), job.pid(1)]
    assert (first.code, first.result, second.code, second.late) == (0, "alone", -signal.SIGKILL, False)
    for pid in pids:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            continue
        raise AssertionError(f"process {pid} is still there")
