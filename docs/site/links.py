"""A hook of mkdocs: files of the repository that pages link to become pages, so that every link is checked."""

import re
from pathlib import Path

from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).parents[2]
UP = re.compile(r"\]\(\.\./([^)#]+\.md)([^)]*)\)")
INTO_THE_TREE = re.compile(r"\[([^\]]*)\]\((?!http|#)[^)]*\)")


def on_files(files, config):
    pages = [file.content_string for file in files.documentation_pages()]
    for name in sorted({found[1] for page in pages for found in UP.finditer(page)}):
        text = INTO_THE_TREE.sub(r"\1", (ROOT / name).read_text())
        there = f"repository/{name}"
        files.append(File.generated(config, there, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown, page, config, files):
    return UP.sub(r"](repository/\1\2)", markdown)
