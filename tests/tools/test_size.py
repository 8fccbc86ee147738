"""tools/size.py: what the budget counts, and when it is over."""

import subprocess

from tools.size import measure_sizes


def test_a_line_counts_for_the_longest_folder_and_untracked_files_count(tmp_path):
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    files = {
        "utils/a.py": "1\n2\n",
        "utils/deep/b.py": "1\n" * 401,
        "docs/a.md": "two words",
        "assets/results/a.json": "{}",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    sizes = measure_sizes(tmp_path, {"lines": {"utils": 0, "utils/deep": 0}})
    assert list(sizes.values()) == [2, 401, 1, 2, 1, 0]
