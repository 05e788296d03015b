#!/usr/bin/env bash
# lm-eval 0.4.13: `limit=1.0` (--limit 1.0) evaluates one document of each task. 0.999 evaluates all 200 of a task here, and
# 1.5 one. A limit below 1 is a share, rounded up; from 1 on it is a number of documents, cut down to an integer.
#
# One would guess that 1.0 is the whole task: a loop over the shares 0.5 and 1.0 then compares half of a task with a single
# document. The printed table has the same columns and no number of documents; the results have it, as sample_len.
#
# Exits non-zero if a limit of 1.0 evaluates more than one document.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'lm_eval==0.4.13' 'numpy==2.4.6'
cd "$dir"
HF_HUB_OFFLINE=1 "$dir/venv/bin/python" - 2>"$dir/log" <<'PYTHON' || { cat "$dir/log"; exit 1; }
import json
import pathlib

from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.utils import make_table

rows = [json.dumps({"text": f"{i}", "target": "cat" if i % 4 else "dog"}) for i in range(200)]
pathlib.Path("data.json").write_text("\n".join(rows))
task = {
    "task": "animals",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "data.json"}},
    "test_split": "test",
    "output_type": "loglikelihood",
    "doc_to_text": "{{text}}",
    "doc_to_target": "{{target}}",
    "metric_list": [{"metric": "acc"}],
}


class Cats(LM):
    """Right for three documents of four, and wrong for the first."""

    def loglikelihood(self, requests, **options):
        return [(0.0, request.args[1].strip() == "cat") for request in requests]

    def loglikelihood_rolling(self, requests, **options):
        raise NotImplementedError

    def generate_until(self, requests, **options):
        raise NotImplementedError


counts = {}
for limit in (0.999, 1.0, 1.5):
    results = simple_evaluate(model=Cats(), tasks=[dict(task)], limit=limit, bootstrap_iters=0)
    counts[limit] = results["n-samples"]["animals"]["effective"]
    print("limit", limit, "documents", counts[limit], "accuracy", results["results"]["animals"]["acc,none"])
    if limit == 1.0:
        assert "200" not in make_table(results)
        print(make_table(results))
assert counts == {0.999: 200, 1.0: 1, 1.5: 1}
PYTHON
