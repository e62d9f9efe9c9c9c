"""The panel set for a project of Weights & Biases: what `wandb` logs, as a saved view.

Knows wandb-workspaces, which it imports when a view is built, and the names that the sink logs under.
"""

from __future__ import annotations

from typing import Any

from tpwatch.errors import ConfigError
from tpwatch.export.wandb import SCALARS, STEP, TABLE

NAME = "replica consistency"


class View:
    """A view of one project with the section of panels about replica consistency.

    Raises:
        ConfigError: wandb-workspaces is not installed.
    """

    def __init__(self, entity: str, project: str) -> None:
        """Build it; needs neither a key nor a network."""
        try:
            import wandb
            import wandb_workspaces.reports.v2 as panels
            from wandb_workspaces import workspaces
        except ImportError:
            rule, remedy = "needs wandb-workspaces", "Install that extra: pip install 'tpwatch[wandb-workspace]'."
            raise ConfigError(knob="wandb workspace", value=f"{entity}/{project}", rule=rule, remedy=remedy) from None
        self._wandb = wandb
        section = workspaces.Section(name=NAME, is_open=True, pinned=True, panels=_panels(panels))
        self._workspace: Any = workspaces.Workspace(entity=entity, project=project, name=NAME, sections=[section])

    def spec(self) -> dict[str, Any]:
        """What would be saved."""
        found: dict[str, Any] = self._workspace._to_model().model_dump(by_alias=True, exclude_none=True)  # noqa: SLF001
        return found

    def save(self) -> str:
        """Save it as a new view; return its address.

        Raises:
            ConfigError: there is no key, no network, or no such project.
        """
        try:
            return str(self._workspace.save().url)
        except (self._wandb.Error, OSError) as error:
            rule, remedy = (
                f"cannot be saved: {str(error).rstrip('.')}",
                "Log in (`wandb login`, WANDB_API_KEY), or look at --dry-run.",
            )
            value = f"{self._workspace.entity}/{self._workspace.project}"
            raise ConfigError(knob="wandb workspace", value=value, rule=rule, remedy=remedy) from None


def _panels(panels: Any) -> list[Any]:  # noqa: ANN401 - of a package imported on demand
    """What went wrong first, then what it does to the copies, then what watching costs."""

    def lines(title: str, *names: str) -> Any:  # noqa: ANN401 - as above
        return panels.LinePlot(title=title, x=STEP, y=[f"{SCALARS}/{name}" for name in names])

    return [
        panels.LinePlot(title="Faults by kind", x=STEP, metric_regex=f"{SCALARS}/faults_.*"),
        lines("Worst ratio", "worst_ratio", "ratio_lo", "ratio_hi"),
        lines("Worst spread", "worst_max_abs"),
        lines("Differing copies", "differing_param", "differing_grad_post"),
        lines("Check time (s)", "check_seconds"),
        panels.WeavePanelSummaryTable(table_name=TABLE),
    ]
