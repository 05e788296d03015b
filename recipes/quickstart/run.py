"""The journey from tokens to the report, in the order in which it happens."""

from __future__ import annotations

from recipes.quickstart import figures, report
from recipes.quickstart.config import QuickstartConfig
from recipes.quickstart.data import Data
from recipes.quickstart.evaluate import choose_device
from recipes.quickstart.folder import RunFolder
from recipes.quickstart.interrupt import Interrupt
from recipes.quickstart.measure import Measurements, measure
from recipes.quickstart.tracking import Tracker, read_metrics
from recipes.quickstart.train import phases, train_phase


def run(
    config: QuickstartConfig,
    folder: RunFolder,
    data: Data,
    tracker: Tracker,
    interrupt: Interrupt,
) -> Measurements:
    """Do whatever of the run in `folder` is not done yet, and write its report.

    Raises Interrupted, with everything kept that is needed to go on, and UserError.
    """
    device = choose_device()
    print(
        f"training on {device}: {config.steps} steps of {config.step_tokens} tokens, preset {config.preset}"
    )

    for phase in phases(config):
        train_phase(config, phase, folder, data, device, tracker, interrupt)

    for kind in ("result", "recovery"):  # of a measurement that was interrupted, or is repeated
        tracker.drop(kind, after_step=-1)
    found = measure(config, folder, data, device, tracker, interrupt)
    tracker.flush()
    drawn = figures.draw(config, read_metrics(folder), found, folder.path)
    report.write(config, folder, data.info, found, drawn, device)
    return found
