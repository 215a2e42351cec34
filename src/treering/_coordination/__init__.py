"""How the processes of a job agree: two-phase commit, messages, heartbeats, and collectives with a deadline.

The two-phase commit of a joint save is pure. The protocols of process 0, the coordinator, and of the others, the
participants, are generators that yield operations and are sent the answers (`two_phase_commit`). `run_protocol` carries
them out in a real folder, ``python -m torture schedules`` in a simulation with kills, pauses and lost answers.

Everything rests on these rules:

- The coordinator commits only when every process has voted that its data is durable.
- A process that has voted so removes its data only when the coordinator says that the attempt failed and was not
  committed.
- The coordinator says so only if it never asked for the commit. If the commit itself failed, only the coordinator,
  which can look, removes anything.
- Every wait has a deadline. A process that gives up tells the others first.
- Each process counts its own calls. Votes with one number are of one call of the program, which saves one state.
"""
