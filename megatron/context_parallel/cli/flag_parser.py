"""Parses a command line with declared flags. Unknown flags and invalid values are rejected here."""

import argparse
import re
import sys
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, TypeVar

from megatron.context_parallel.errors import UsageError, raise_all

from .flag import Flag, FlagSection, ForeignFlag
from .flag_checks import check_each, check_relations

Section = TypeVar("Section", bound=FlagSection)


class FlagParser(Generic[Section]):
    """The flags of a program.

    Args:
        declared: a section that declares them, or a class of several sections, in the order of `--help`.
        description: what the program does, for `--help`.
        usage: the arguments after its name, for `--help`.
        examples: the flags of working command lines, at the end of `--help`.
        foreign: flags of another program by option, which `--help` does not list.
        instead: what to do instead of flags that a user of the other programs may expect, by option.
        torchrun: whether torchrun starts it.
        most_used: fields that plain `--help` lists, with the groups; `--help GROUP` lists a group, `--help all` all
            groups. Default: `--help` lists all.

    Attributes:
        flags: flags by field.
        by_option: flags by their names on the command line, including former names, which `--help` does not list.
    """

    def __init__(
        self,
        declared: type[Section],
        description: str | None,
        usage: str,
        examples: Sequence[str],
        foreign: Mapping[str, ForeignFlag] | None = None,
        instead: Mapping[str, str] | None = None,
        torchrun: bool = False,
        most_used: Collection[str] = (),
    ) -> None:
        self.declared = declared
        self.description = description
        self.usage = usage
        self.examples = examples
        self.torchrun = torchrun
        self.most_used = most_used
        self.flags = declared.declared
        former = {"--" + flag.formerly.replace("_", "-"): flag for flag in self.flags.values() if flag.formerly}
        self.by_option = former | {flag.option: flag for flag in self.flags.values()}
        self.foreign, self.instead = foreign or {}, instead or {}
        self._parsers = dict[str, argparse.ArgumentParser]()

    def parse(self, argv: list[str] | None = None) -> Section:
        """The checked flags of a command line (default: the program's). Raises UsageError for invalid ones."""
        unknown = list[UsageError]()
        flags = self.declared(**self.read(argv, unknown))
        raise_all([*unknown, *check_each(flags)])
        raise_all(check_relations(flags))
        return flags

    def read(self, argv: list[str] | None, unknown: list[UsageError]) -> dict[str, Any]:
        """The values on a command line (None: the program's), by field; values of foreign flags by option.

        `unknown` receives the error about unknown words.

        Raises:
            UsageError: a line for each flag with an invalid value, with a value that works, and for each unknown word.
        """
        given, wrong = self._split(sys.argv[1:] if argv is None else argv, unknown)
        if self.most_used and "help" in given:
            print(self.help(given["help"]), end="")
            sys.exit(0)
        values = dict[str, Any]()
        for name, text in given.items():
            try:
                values[name] = self.flags[name].parse(text) if name in self.flags else text
            except UsageError as error:
                wrong.append(error)
        if wrong:
            raise_all([*unknown, *wrong])
        return values

    def _split(self, words: list[str], unknown: list[UsageError]) -> tuple[dict[str, Any], list[UsageError]]:
        """The texts on a command line, by field; and the errors about flags with too few values."""
        wrong = list[UsageError]()
        while True:
            try:
                given, rest = self._parser().parse_known_args(words)
                break
            except argparse.ArgumentError as error:
                options = str(error.argument_name).split("/")  # all names of the flag: --cp-overlap/--no-cp-overlap
                works = f"; give {self.by_option[options[0]].works}" if options[0] in self.by_option else ""
                wrong.append(UsageError(f"{options[0]}: {error.message}{works}"))
                # argparse stops at the first error, so the flag is removed and parsing repeated.
                kept = [word for word in words if word.split("=")[0] not in options]
                if kept == words:  # it stands in another form, such as -hx
                    raise_all(wrong)
                words = kept
        if rest:
            text, misspelled = self.explain_unknown(rest, words)
            # Without the intended flag, others would be rejected without reason.
            (wrong if misspelled else unknown).append(UsageError(text))
        return vars(given), wrong

    def _parser(self) -> argparse.ArgumentParser:
        """The parser of all flags, whose help names the program that runs. Making it takes longer than its use."""
        program = sys.argv[0]
        if program not in self._parsers:
            self._parsers[program] = self.build()
        return self._parsers[program]

    def build(self, listed: Collection[str] | None = None) -> argparse.ArgumentParser:
        """A parser of all flags, in groups by section. Its results are texts for `Flag.parse`.

        Its help lists the flags of the fields in `listed` (default: all).
        """
        parser = argparse.ArgumentParser(
            usage=f"{self._start('N')} {self.usage}".replace("%", "%%"),
            description=self.description,
            epilog="\n  ".join(["examples:", *(f"{self._start('2')} {words}".rstrip() for words in self.examples)]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
            exit_on_error=False,
            add_help=not self.most_used,
        )
        if self.most_used:
            words: dict[str, Any] = {"nargs": "?", "const": "", "metavar": "GROUP"}
            parser.add_argument("-h", "--help", help="list the flags of a group, or of all groups with all", **words)
        for section in self.declared.sections:
            group = parser.add_argument_group(section.title) if section.title else parser
            for flag in section.declared.values():
                words = {"nargs": "+" if flag.many else None, "metavar": flag.unit}
                if flag.kind is bool:
                    words = {"action": argparse.BooleanOptionalAction if flag.optional else "store_true"}
                elif flag.adds_up:
                    words["action"] = "extend"
                text = self._help(flag) if listed is None or flag.name in listed else argparse.SUPPRESS
                if flag.positional:  # `check_each` reports a missing one, with a value that works
                    group.add_argument(flag.name, help=text, **words).required = False
                else:
                    group.add_argument(flag.option, dest=flag.name, help=text, **words)
        for option, flag in self.by_option.items():
            if option != flag.option:
                parser.add_argument(option, dest=flag.name, help=argparse.SUPPRESS)
        for option, other in self.foreign.items():
            words = {"nargs": other.nargs} if other.nargs else {"action": "store_const", "const": []}
            parser.add_argument(option, dest=option, help=argparse.SUPPRESS, **words)
        return parser

    def help(self, group: str) -> str:
        """The output of `--help GROUP`; with "", the most used flags and the groups. Raises UsageError."""
        groups = {section.title.replace(" ", "-"): section for section in self.declared.sections}
        if group == "all":
            return self.build().format_help()
        if group in groups:
            return self.build(groups[group].declared).format_help()
        if group:
            raise UsageError(f"--help {group}: unknown; choose {' or '.join(('all', *groups))}")
        parser = self.build(self.most_used)
        lines = [f"  {name:23} {section.__doc__}" for name, section in groups.items()]
        parser.description = "\n".join([f"{self.description}\n", "groups of flags, for --help GROUP:", *lines])
        return parser.format_help()

    def _start(self, ranks: str) -> str:
        """The command that starts the program on `ranks` ranks."""
        program = sys.argv[0]
        script = program.endswith(".py")
        program = program if script else Path(program).name
        if not self.torchrun:
            return f"python {program}" if script else program
        return f"torchrun --nproc-per-node {ranks} {'' if script else '--no-python '}{program}"

    def _help(self, flag: Flag) -> str:
        text = flag.help + "".join(f"; with {self._named(need)}" for need in flag.needs.split())
        text += "".join(f"; not with {self._named(other)}" for other in flag.excludes.split())
        if flag.required:
            text += "; required without it" if flag.excludes else "; required"
        default = flag.derived or (None if flag.kind is bool else flag.default)
        return (text if default is None else f"{text} (default: {default})").replace("%", "%%")

    def _named(self, condition: str) -> str:
        """The flag of a name in a declaration: `--recompute-granularity full` for "recompute_granularity=full"."""
        name, _, value = condition.partition("=")
        return self.flags[name].as_flag(value) if value else self.flags[name].option

    def explain_unknown(self, unknown: list[str], words: list[str]) -> tuple[str, bool]:
        """The errors about words that are neither flags nor values; and whether one of them is misspelled."""
        owners = self._owners(unknown, words)
        advised = [option for option in owners if option in self.instead]
        wrong = [f"{option}: not a flag of this command; {self.instead[option]}" for option in advised]
        options = []
        for option, following in owners.items():
            if option in advised:
                continue
            if option in self.by_option or option in self.foreign:
                works = f"; give {self.by_option[option].works}" if option in self.by_option else ""
                wrong.append(f"{option}: followed by {' '.join(following)}, which is neither flag nor value{works}")
            elif option:
                options.append(option)
            else:
                wrong += [f"{word}: unknown word" for word in following]
        nearest = [self._closest(option) for option in options]
        for option, near in zip(options, nearest, strict=True):
            wrong.append(f"{option}: unknown flag" + (f" (did you mean {near}?)" if near else ""))
        if not all(nearest) or not (options or advised):
            such = min(self.flags.values(), key=lambda flag: (flag.positional, not flag.required))
            how = "--help all" if self.most_used else "--help"
            wrong.append(f"{how} lists the flags, such as {such.option}")
        return "; ".join(wrong), any(nearest)

    def _owners(self, unknown: list[str], words: list[str]) -> dict[str, list[str]]:
        """Unknown flags and words, by the flag that they are or follow; "" for words before the first flag."""
        owners = dict[str, list[str]]()
        option = ""
        left = deque(unknown)
        for word in words:
            if _is_flag(word):
                option = word.split("=")[0]
            if left and word == left[0]:
                following = owners.setdefault(option, [])
                if not _is_flag(left.popleft()):
                    following.append(word)
        return owners

    def _closest(self, word: str) -> str | None:
        """The flag with a similar spelling that has all words of `word`: --vocab-file does not suggest --vocab-size."""
        given, alike = word.strip("-").replace("_", "-").lower(), []
        options = [flag.option for flag in self.flags.values() if not flag.positional]
        for option in [*options, *self.foreign]:
            name = option[2:]
            if all(get_close_matches(part, name.split("-"), 1, 0.7) for part in given.split("-")):
                alike.append(name)
        return next((f"--{name}" for name in get_close_matches(given, alike, 1, 0.7)), None)


def _is_flag(word: str) -> bool:
    return re.match("--?[A-Za-z]", word) is not None
