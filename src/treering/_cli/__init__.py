"""The command line: one module for each verb, imported only when that verb runs."""
