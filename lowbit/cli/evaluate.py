"""`lowbit eval`: `lowbit.evaluate` of folders on a text."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from lowbit.cli.language_model import check, load, tokenizer_of
from lowbit.cli.output import check_picture, print_json, print_table, save_picture
from lowbit.cli.windows import length_of, tokens_of, windows_of
from lowbit.inference import evaluate as evaluate_models
from lowbit.inference.evaluation.call import Made


def evaluate(
    models: list[Path],
    data: Path,
    against: Path | None,
    context: int | None,
    limit: int | None,
    by_layer: bool,
    tasks: str,
    examples: int | None,
    device: str,
    json: bool,
    picture: Path | None,
) -> None:
    """The command `eval`. Args: those of `lowbit.cli.app.evaluate`."""
    check_picture(picture)
    for path in (*models, *([] if against is None else [against])):
        check(path)
    if by_layer and against is None:
        raise ValueError("--by-layer compares with the original; give --against too")
    first = models[0]
    tokens = tokens_of(first, data, limit)
    judged = load(first if against is None else against, device)
    original = None if against is None else judged
    made: dict[str, Made] = {str(path): partial(load, path, device) for path in models}
    if original is None:
        made[str(first)] = judged
    windows = windows_of(tokens, length_of(judged, context))
    report = evaluate_models(
        made,
        original,
        [{"input_ids": window, "use_cache": False} for window in windows],
        by_layer=by_layer,
        tasks=[name for name in tasks.split(",") if name],
        tokenizer=tokenizer_of(first) if tasks else None,
        limit=examples,
    )
    if picture is not None:
        save_picture(report.figure(), picture)
    if json:
        print_json({"data": str(data), **report.to_dict()})
        return
    head, *rows = report.rows()
    print_table(f"{report.models[0].tokens:,} predicted tokens of {data}", head, rows)
    if by_layer:
        head, *rows = report.layer_rows()
        print_table("", head, rows)
