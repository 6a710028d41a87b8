"""What the README shows is what the code does."""

import doctest
import re
from pathlib import Path

import pytest

import sklearn_mhal.__main__ as demo

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_python_blocks_run_as_written():
    blocks = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    assert blocks
    names: dict = {}
    for index, block in enumerate(blocks):
        test = doctest.DocTestParser().get_doctest(block, names, f"README block {index}", "README.md", 0)
        assert test.examples
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        assert runner.run(test, clear_globs=False).failed == 0
        names = test.globs


def test_fresh_machine_needs_exactly_two_commands():
    commands = re.findall(r"^python3 -m venv .*$", README, flags=re.MULTILINE)
    assert len(commands) == 2
    assert commands[0].endswith("-m sklearn_mhal")
    assert "pytest" in commands[1]


def comparable(text):
    """Return the table of heads: norms and entries, which no rounding changes, without the errors."""
    rows = re.findall(
        r"^.{8}(?:attention|projection|          ) +(?:true|found).*$", text, flags=re.MULTILINE
    )
    return [re.sub(r"\d\.\de-\d+", "", row).split() for row in rows]


def test_result_is_one_that_the_code_prints(capsys):
    shown = re.search(r"^```text\n(Layer .*?)^```", README, flags=re.MULTILINE | re.DOTALL).group(1)
    assert demo.main([]) == 0
    printed = capsys.readouterr().out
    assert len(comparable(shown)) == 12
    assert comparable(shown) == comparable(printed)
    assert shown.splitlines()[:3] == printed.splitlines()[:3]
    error = float(re.search(r"recovery error (\S+),", shown).group(1))
    assert error == pytest.approx(0.0, abs=1e-10)
