"""What all commands have in common: none takes an empty value."""

from typing import Any

import typer
from typer.core import TyperCommand

from benchd.daemon.errors import UsageError


class StrictCommand(TyperCommand):
    """Refuses an empty value: an unset variable of a script would silently drop the option, or mean this folder."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as usual; raise UsageError that names the empty option or argument."""
        given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        for parameter in self.params:
            value = given.get(parameter.name)
            if "" in (value if isinstance(value, list | tuple) else [value]):
                name = parameter.opts[0]
                name = name if name.startswith("-") else name.upper()
                raise UsageError(f"{name} is empty: is the variable behind it set? Give a value, or leave it out")
        return super().parse_args(ctx, args)


class Application(typer.Typer):
    """A Typer application of such commands."""

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = StrictCommand, **settings: Any
    ) -> Any:
        """Register a function as usual."""
        return super().command(name, cls=cls, **settings)
