"""Bash scripts are followed without running anything."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from rlscale.errors import ConfigError
from rlscale.migration import shell_script
from rlscale.migration.shell_script import ScriptRecord, read_script
from rlscale.migration.shell_values import template_of, value_of


def follow(folder: Path, text: str, given: Mapping[str, str] | None = None) -> ScriptRecord:
    path = folder / "run.sh"
    path.write_text(text)
    return read_script(path, given=given or {})


def words(folder: Path, text: str, given: Mapping[str, str] | None = None) -> list[str]:
    """The words of the last command `run`."""
    record = follow(folder, text, given)
    command = [each for each in record.commands if value_of(each.words[0]) == "run"][-1]
    return [value_of(word) for word in command.words[1:]]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        # Arrays, comments in them, `+=` and continuation lines.
        ("A=(\n --a 1 # one\n #--b 2\n --c 'x y'\n)\nA+=(--d)\nrun \\\n  ${A[@]}", "--a|1|--c|x|y|--d"),
        ('A=(--c \'x y\' "")\nrun "${A[@]}"', "--c|x y|"),
        ('A=()\nrun "${A[@]}" end', "end"),
        ("A=(1 2 3)\nrun ${#A[@]} ${A[1]} ${A[-1]}", "3|2|3"),
        ("A[2]=x\nrun ${#A[@]} ${A[2]}", "3|x"),
        # Parameters.
        ("run ${X:-d} ${X-e} ${X:+f} ${X:=g} $X", "d|e|g|g"),
        ("X=a/b.c\nrun ${X##*/} ${X%.c} ${X/b/z} ${X:0:1} ${#X} ${X^^}", "b.c|a/b|a/z.c|a|5|A/B.C"),
        ('X="a b"\nrun $X "$X" pre"$X"post', "a|b|a b|prea bpost"),
        ('N=2\nM=3\nrun [0]*$N+[1]*$M "[0]*$N"', "[0]*2+[1]*3|[0]*2"),
        ("run a\\ b $'c\\td' '$X' \"\\$X\"", "a b|c\td|$X|$X"),
        # Arithmetic.
        ("A=7\nB=2\nrun $((A / B)) $((A % B)) $((A > B && B > 1)) $((-A / B)) $((A*(B+1)))", "3|1|1|-3|21"),
        ("i=1\n((i++))\n((i+=5))\nlet i=i*2\nrun $i $((i > 3 ? 1 : 0))", "14|1"),
        # Branches.
        ('if [ -z "$X" ] || [[ $X -le 0 ]]; then Y=8; else Y=9; fi\nrun $Y', "8"),
        ("X=b\ncase $X in a|b) Y=1;; *) Y=2;; esac\nrun $Y", "1"),
        ("X=q\ncase $X in a|b) Y=1;; *) Y=2;; esac\nrun $Y", "2"),
        ("X=1\nif ((X < 1)); then Y=a; elif [[ $X == 1 ]]; then Y=b; else Y=c; fi\nrun $Y", "b"),
        ('[ -n "$X" ] && Y=1\n[ -n "$X" ] || Y=2\nrun $Y', "2"),
        ("X=qwen3-4B\nif [[ $X =~ ^qwen3 ]]; then Y=1; fi\nif [[ $X == *4B ]]; then Z=2; fi\nrun $Y $Z", "1|2"),
        # Loops that fill arrays.
        ("for ((i=0; i<4; i++)); do if (( i < 1 )); then A+=(0); else A+=(1); fi; done\nrun ${A[*]}", "0|1|1|1"),
        ("for x in 1 2 3; do [ $x -eq 2 ] && continue; A+=($x); done\nrun ${A[@]}", "1|3"),
        ("i=0\nwhile [ $i -lt 3 ]; do A+=(x$i); i=$((i+1)); done\nrun ${A[@]}", "x0|x1|x2"),
        ('A=(1 2)\nprintf -v F "[%s]" "$(IFS=\', \'; echo "${A[*]}")"\nrun $F', "[1,2]"),
        # Functions and here documents.
        ("f() { local a=$1; A+=(--$a); }\nf x\nf y\nrun ${A[@]}", "--x|--y"),
        ('f() { A="$X-$Y"; Z=kept; }\nX=1\nX=2 Y=3 f\nrun $A "$X" "$Y" $Z', "2-3|1||kept"),
        ("X=4 eval 'A=$X'\nrun $A \"$X\"", "4|"),
        ('X=1\nT=$(cat <<EOF\nv=$X\nEOF\n)\nrun "$T"', "v=1"),
        ("run $(basename /a/b.sh .sh) $(dirname /a/b) $(seq -s, 1 3)", "b|/a|1,2,3"),
        ('set -- --p 1\nrun "$@" $#', "--p|1|2"),
        ("eval 'run a b'", "a|b"),
    ],
)
def test_words_of_a_command(tmp_path: Path, script: str, expected: str) -> None:
    assert words(tmp_path, script) == expected.split("|")


def test_nothing_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    follow(tmp_path, f"touch {mark}\nX=$(touch {mark})\n`touch {mark}`\necho x > {mark}\ncat > {mark} <<EOF\nx\nEOF\n")
    assert not mark.exists()


def test_the_output_of_a_program_is_not_known(tmp_path: Path) -> None:
    record = follow(tmp_path, "N=$(nvidia-smi -L | wc -l)\nif [ $N -gt 0 ]; then X=1; fi\nrun --n $N $X")
    (command,) = [each for each in record.commands if value_of(each.words[0]) == "run"]
    assert [word[0].known for word in command.words[2:3]] == [False]


def test_a_variable_of_the_environment_is_an_interpolation(tmp_path: Path) -> None:
    record = follow(tmp_path, 'A=${N:-8}\nB="/m/${NAME:-q w}/$OTHER"\nrun $A "$B" $((A*2))')
    shown = [template_of(word) for word in record.commands[-1].words[1:]]
    assert shown == ["${oc.env:N,8}", "/m/${oc.env:NAME,'q w'}/${oc.env:OTHER}", "16"]
    assert {name: use.default for name, use in record.variables.uses.items()} == {
        "N": "8",
        "NAME": "q w",
        "OTHER": None,
    }


def test_a_given_variable_cannot_be_changed(tmp_path: Path) -> None:
    script = "N=$(count)\nif [ $N -le 0 ]; then N=1; fi\nrun $N ${N:-2}"
    assert words(tmp_path, script, {"N": "8"}) == ["8", "8"]


def test_sourced_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "m.sh").write_text("M=(--layers ${L:-2})\n")
    here = 'D="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\n'
    record = follow(tmp_path, here + 'source "${D}/models/m.sh"\nrun ${M[@]}')
    command = record.commands[-1]
    assert [value_of(word) for word in command.words] == ["run", "--layers", "2"]
    assert command.words[1][0].source.file.endswith("models/m.sh")
    assert not record.notes


def test_a_sourced_file_has_the_variables_in_front_of_it(tmp_path: Path) -> None:
    """As slime's qwen3-4B-Instruct-2507.sh sources qwen3-4B.sh."""
    (tmp_path / "model.sh").write_text('A=(--rotary-base "${BASE:-1000000}")\n')
    assert words(tmp_path, 'BASE=5000000 source model.sh\nrun "${A[@]}" "$BASE"') == ["--rotary-base", "5000000", ""]


def test_a_wrong_path_of_a_sourced_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "m.sh").write_text("M=1\n")
    record = follow(tmp_path, "X=1\nsource /none/models/m.sh\nrun $M")
    ((source, text),) = record.notes
    assert (
        source.line == 2 and "/none/models/m.sh, which does not exist here" in text and "models/m.sh was read" in text
    )
    assert value_of(record.commands[-1].words[1]) == "1"


@pytest.mark.parametrize(
    "script",
    [
        "while true; do X=1; done",
        "source ./run.sh",
        "f() { f; }\nf",
        "X=aaaaaaaaaa\nfor i in 1 2 3 4 5 6 7; do X=$X$X$X$X$X$X$X$X; done",
    ],
)
def test_an_endless_script_is_refused(tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The limits are for long scripts: a second of interpretation each.
    monkeypatch.setattr(shell_script, "MAX_STEPS", 1_000)
    monkeypatch.setattr(shell_script, "MAX_CHARACTERS", 20_000)
    with pytest.raises(ConfigError, match="must"):
        follow(tmp_path, script)


def test_wrong_syntax_is_reported_with_its_line(tmp_path: Path) -> None:
    record = follow(tmp_path, "A=1\nrun $A\n) x\n")
    ((source, text),) = record.notes
    assert (source.line, text) == (3, "bash cannot read `)`")
    assert [value_of(word) for word in record.commands[0].words] == ["run", "1"]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ('read -r A B <<< "8 4 2"\nrun --a $A --b "$B"', ["--a", "8", "--b", "4 2"]),
        ("declare -A M=([lr]=1e-6 [bs]=32)\nrun --lr ${M[lr]} --b ${M[bs]}", ["--lr", "1e-6", "--b", "32"]),
        ("M[lr]=1e-5\nfor k in lr; do\nrun --lr ${M[$k]}\ndone", ["--lr", "1e-5"]),
    ],
)
def test_words_of_rare_assignments(script: str, expected: list[str], tmp_path: Path) -> None:
    assert words(tmp_path, script) == expected
