"""The fresh process of the demo: it knows the code and the file, nothing else of the run.

``python -m treering._cli.demo.fresh FILE`` prints one line of JSON, the `Evidence` of the state in FILE.
"""

from __future__ import annotations

import sys
import time

from treering import serialization
from treering._cli.demo import model, prove, text

__all__: list[str] = []


def _main(file: str) -> None:
    config = model.Config(alphabet_size=0)
    corpus = text.load_corpus(context=config.context, seed=config.seed)
    target = prove.template(corpus)
    began = time.perf_counter()
    state = serialization.load_from_file(target, file, strict=True, to_jax=True)
    seconds = time.perf_counter() - began
    print(prove.as_json(prove.evidence_of(state, corpus, load_seconds=seconds)))


if __name__ == "__main__":
    _main(sys.argv[1])
