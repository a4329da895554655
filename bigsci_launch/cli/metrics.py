"""`bsl metrics`: what a run knows, as metrics and in experiment trackers."""

from __future__ import annotations

import click

from bigsci_launch.cli import console
from bigsci_launch.cli.options import RUN


@click.command(short_help="Print a run's metrics, or keep them up to date.", epilog="Example: bsl metrics demo")
@RUN
@click.option("--follow", is_flag=True, help="Keep monitor.metrics and monitor.trackers of the run file up to date.")
@click.option("--dashboard", is_flag=True, help="Print the dashboard for Grafana as JSON.")
def metrics(run: str | None, follow: bool, dashboard: bool) -> None:
    """Print the metrics of RUN (a name or a directory; default: the run submitted last) in the format of OpenMetrics.

    What is not known has no metric. With --follow, which the job script starts by itself if the run file has one of
    these keys, files, port and trackers are kept up to date until the attempt is over.
    """
    from bigsci_launch.export.companion import Scrape, keep_up_to_date
    from bigsci_launch.export.dashboard import dashboard_text
    from bigsci_launch.runs.find import find_run
    from bigsci_launch.watch.rounds.until_over import EndSignals

    if dashboard and (follow or run is not None):
        raise click.UsageError("--dashboard is for all runs: without RUN and --follow")
    if dashboard:
        console.answer(dashboard_text())
    elif follow:
        signals = EndSignals()
        keep_up_to_date(find_run(run), signals, console.talk)
    else:
        console.answer(Scrape(find_run(run)).text().rstrip("\n"))
