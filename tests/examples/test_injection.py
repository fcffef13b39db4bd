"""The example of injection campaigns, at a small size, and the campaign of docs/campaigns.md."""

import re
from pathlib import Path

from examples.injection import __main__ as command
from holdfast.inject import Results

ROOT = Path(__file__).parents[2]


def test_the_example_runs_and_protection_leaves_no_silent_corruption(tmp_path, capsys):
    small = ["--trials", "8", "--steps", "0", "--width", "4", "--out", str(tmp_path)]
    assert command.main(small) == 0
    printed = capsys.readouterr().out
    sections = dict(re.findall(r"^(\w[^\n]*)\n(what .*?|fault .*?)\n\n", printed, re.M | re.S))
    assert "silent  " in sections["the classifier without protection"]
    protected = sections["the classifier under protection"]
    assert re.search(r"^product +4 +4 ", protected, re.M)  # all corrected
    assert "silent  " not in protected.replace("silent, 95 %", "")
    assert len(list(tmp_path.iterdir())) == 4


def test_the_campaign_of_five_lines_in_the_documents_runs():
    text = (ROOT / "docs" / "campaigns.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?ResNetConfig.*?)^```", text, re.M | re.S)
    lines = [line for line in block.splitlines() if line]
    assert len([line for line in lines if not line.startswith(("import", "from"))]) <= 5
    small = block.replace("8, 3, 224, 224", "1, 3, 32, 32").replace("trials=1000", "trials=24")
    small = re.sub(r"workers=\d+", "workers=1", small)
    assert small != block
    names: dict[str, object] = {}
    exec(small, names)
    results = names["results"]
    assert isinstance(results, Results)
    assert results.rate("masked").trials == 24
    assert len({row["layer"] for row in results.rows}) > 12
