"""The common behaviour of all commands: they reject empty values and group long help."""

import re
from typing import Any

import typer
from typer.core import TyperCommand

from benchd.daemon.errors import UsageError

MOST_TOGETHER = 12  # maximum number of options that are not grouped
GROUPS = {
    "Cases": "models variants batch-sizes option beside preset processes seed threads direction provider dla",
    "Requests": "scenario streams rate find-rate deadline percentile queue",
    "Your own model": "module onnx nir reference input",
    "Weights and inputs": "weights data inputs labels accuracy metric calibration",
    "Limits": "max-latency max-power max-energy max-memory min-agreement max-drop min-effect minutes",
    "Trace": "method steps warmup workload kernel-regex snn-kernels sort verify",
    "Results": "output mqtt ca-file certificate-file key-file baseline fail-on report json junit markdown case records",
}
FORMS = {"int": "N", "float": "N", "path": "FILE"}
"""The placeholder for a value in the help, by the option's type, unless the option defines its own."""


class StrictCommand(TyperCommand):
    """Rejects empty values: a script's unset variable would silently drop the option, or mean the current folder."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, in groups if there are many."""
        rows: dict[str, list[tuple[str, str]]] = {"Arguments": [], **{group: [] for group in GROUPS}, "Options": []}
        many = len(self.get_params(ctx)) > MOST_TOGETHER
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                group = _group(parameter, many=many)
                form = re.sub(r"<(\w+)( range)?>", lambda match: FORMS.get(match[1], match[0]), record[0])
                rows[group].append((re.sub(r" <.*", "", record[0]) if group == "Arguments" else form, record[1]))
        for group, of_group in rows.items():
            if of_group:
                with formatter.section(group):
                    formatter.write_dl(of_group)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the usage line's parts; a placeholder that already shows how many values there are stays as it is."""
        return [piece.replace("]]...", "]]") for piece in super().collect_usage_pieces(ctx)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as usual; raise UsageError with the name of an empty option or argument."""
        given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        for parameter in self.params:
            value = given.get(parameter.name)
            if "" in (value if isinstance(value, list | tuple) else [value]):
                name = parameter.opts[0]
                name = name if name.startswith("-") else name.upper()
                raise UsageError(f"{name} is empty: is the variable behind it set? Give a value, or leave it out")
        return super().parse_args(ctx, args)


def _group(parameter: Any, *, many: bool) -> str:
    if parameter.param_type_name == "argument":
        return "Arguments"
    name = parameter.opts[0].removeprefix("--")
    return next((group for group, names in GROUPS.items() if many and name in names.split()), "Options")


class Application(typer.Typer):
    """A Typer application with such commands."""

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = StrictCommand, **settings: Any
    ) -> Any:
        """Register a function as usual."""
        return super().command(name, cls=cls, **settings)
