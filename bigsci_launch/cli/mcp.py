"""`bsl mcp`: a door for agents."""

from __future__ import annotations

import click

from bigsci_launch.cli import console
from bigsci_launch.errors import INSTALL_MCP, BslError


@click.command(short_help="Answer the questions of agents (MCP).", epilog="Example: bsl mcp --skill > SKILL.md")
@click.option("--act", is_flag=True, help="Offer control and cancel too: shown first, done after a confirmation.")
@click.option("--skill", is_flag=True, help="Print what teaches an agent the workflow, as a SKILL.md.")
def mcp(act: bool, skill: bool) -> None:
    """Answer the questions of agents over stdin and stdout, by the Model Context Protocol: what runs do, why they
    ended, hang or are slow, their logs, weights and plans. An agent's program starts it.

    Without --act, no tool changes a run or a job. Texts of logs and stacks are marked as data.
    """
    if skill:
        from bigsci_launch.agents.skill import skill_text

        console.answer(skill_text())
        return
    try:
        from bigsci_launch.agents.server import make_server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("mcp", "mcp_types"):
            raise
        raise BslError("bsl mcp needs the package mcp, which is not installed", hint=INSTALL_MCP) from error
    make_server(may_act=act).run()
