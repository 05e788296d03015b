#!/usr/bin/env bash
# sentence-transformers 6.2.0: quantize_embeddings(..., precision="int8") gives each dimension a start and a step of its
# own, from its smallest and largest value, and the search multiplies the codes without either. So a dimension that
# hardly varies counts as much as the one that varies most, and each code has an offset. Of 2,000 normalized embeddings
# whose dimensions differ in size (a standard deviation of the logarithm of 0.5, so most are within a factor of 3), the
# dot products of codes find 24% of the 10 nearest, and their cosines 26%. Queries in float32 against codes, as
# semantic_search_faiss and semantic_search_usearch rescore, find 52%. One scale for all dimensions finds 96%.
#
# One would guess that 8 bits a dimension are nearly lossless, as they are for weights and activations (an error of 1%),
# and that finer scales, one a dimension, are the better ones. They are where a product is multiplied by them again.
#
# Exits non-zero if the codes find more than half of the nearest.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6' 'scikit-learn==1.9.1' 'scipy==1.17.1' 'tqdm==4.70.1' \
    'transformers==5.23.0' 'sentence-transformers==6.2.0'
"$dir/venv/bin/python" - 2>"$dir/log" <<'PYTHON' || { cat "$dir/log"; exit 1; }
import numpy as np
from sentence_transformers.util import quantize_embeddings

rng = np.random.default_rng(0)
size = np.exp(rng.normal(size=256) * 0.5)


def normalized(x):
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


documents = normalized(rng.normal(size=(2000, 256)) * size + 0.5 * rng.normal(size=256) * size)
noise = rng.normal(size=(100, 256)) * size / np.linalg.norm(size)
queries = normalized(documents[:100] + 0.3 * noise)
ranges = np.stack([documents.min(0), documents.max(0)])
codes, own = (
    quantize_embeddings(x, precision="int8", ranges=ranges).astype(np.float32) for x in (documents, queries)
)
step = np.abs(documents).max() / 127


def nearest(a, b):
    return np.argsort(-(a @ b.T), axis=1)[:, :10]


exact = nearest(queries, documents)
found = {
    "dot products of codes": nearest(own, codes),
    "cosines of codes": nearest(normalized(own), normalized(codes)),
    "float queries, codes of documents": nearest(queries, codes),
    "one step for all dimensions": nearest(np.round(queries / step), np.round(documents / step)),
}
share = {name: np.mean([len({*a} & {*b}) / 10 for a, b in zip(rows, exact)]) for name, rows in found.items()}
for name, value in share.items():
    print(f"{name}: {value:.0%} of the 10 nearest")
assert share["dot products of codes"] < 0.5 and share["cosines of codes"] < 0.5, "the behaviour changed"
assert share["float queries, codes of documents"] < 0.7 and share["one step for all dimensions"] > 0.9
PYTHON
