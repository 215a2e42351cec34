"""How the processes of a job agree: two-phase commit, messages, heartbeats, and collectives with a deadline."""
