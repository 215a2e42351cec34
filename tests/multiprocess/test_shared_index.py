"""Process 0 of a large job reads the index for all, and each process opens the files that it needs."""

from __future__ import annotations

from pathlib import Path

from tests.multiprocess.jobs import Crews, results
from tests.multiprocess.shared_index import shares


def test_one_process_reads_the_index_for_all(tmp_path: Path, crews: Crews) -> None:
    found = results(crews.run(shares, 4, arguments=[str(tmp_path)], timeout=180))
    by_case = {name: [one[name] for one in found] for name in found[0]}

    def of(case: str, member: str) -> list[object]:
        return [one.get(member) for one in by_case[case]]

    for case, number in {"own": 1, "columns": 1, "rows": 1, "run": 3, "again": 1, "some are not sure": 1}.items():
        assert of(case, "result") == [number] * 4, by_case[case]
    # Each for itself: all documents and all files. One for all: one document, and each process the file that it reads.
    assert of("own", "files") == [4] * 4
    assert of("own", "indexes") == [1] * 4
    for case in ("columns", "rows", "again"):
        assert of(case, "indexes") == [1, 0, 0, 0]
        assert of(case, "files") == [1] * 4
    assert of("some are not sure", "indexes") == [2, 1, 1, 1]
    for case in ("another folder", "no folder"):
        assert of(case, "error") == ["NotSharedError"] * 4, by_case[case]
        assert of(case, "processes") == [[1]] * 4
    assert of("a file is lost", "error") == ["CorruptError"] * 4, by_case["a file is lost"]
    assert all("-00001" in str(one["message"]) for one in by_case["a file is lost"])
    # Whoever does not find the files of the index reads the one that is there.
    assert of("replaced", "result") == [5] * 4, by_case["replaced"]
    assert of("other bytes arrive", "result") == [1] * 4
    assert of("other bytes arrive", "indexes") == [1, 0, 1, 0]
