"""How the processes of a job save together: who says what when, who waits for whom, and when data may be removed.

Pure: the steps of process 0 (`leading`, `refused`) and of the others (`following`) are generators that yield operations
and are sent the answers. `treering._coordination.executor` carries them out on a real folder, ``python -m
torture schedules`` in a world of its own with kills, pauses and lost answers.

The rules that everything rests on:

- Process 0 commits only when every process has said that its data is durable.
- Whoever has said so removes its data only when process 0 says that the attempt failed and was not committed.
- Process 0 says so only if it never asked for the commit. If the commit itself failed, nobody removes anything but
  process 0, which can look.
- Every wait has a deadline, and whoever gives up tells the others first.
- Each process counts its own calls. Parts with one number are of one call of the program, which saves one state.
"""

from __future__ import annotations
