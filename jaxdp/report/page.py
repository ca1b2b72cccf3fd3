"""A self-contained HTML page: no network, no framework; opens from disk and in notebooks."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path

from jaxdp.errors import StorageError


@dataclass(frozen=True)
class Page:
    """A whole HTML document, which a notebook shows where it is the value of a cell.

    Attributes:
      title: shown by the browser, and instead of the page where none can be shown.
      html: the document.
      height: pixels that a notebook gives it.
    """

    title: str
    html: str
    height: int = 640

    def save(self, path: str | Path) -> None:
        """Writes the document.

        Raises:
          StorageError: it cannot be written.
        """
        try:
            Path(path).write_text(self.html, encoding="utf-8")
        except OSError as error:
            raise StorageError(f"{path}: cannot be written: {error.strerror}") from error

    def __repr__(self) -> str:
        return f"<{self.title}: {len(self.html) / 1024:.0f} KiB of HTML>"

    def _repr_html_(self) -> str:
        # a frame keeps its styles, keys and identifiers apart from the notebook's and other cells'
        return (
            f'<iframe title="{escape(self.title)}" srcdoc="{escape(self.html)}" '
            f'style="width:100%;height:{self.height}px;border:0"></iframe>'
        )


def make_page(
    title: str, body: str, *, assets: Sequence[str] = (), height: int = Page.height
) -> Page:
    """A page from its body.

    Args:
      title: of the document, plain text.
      body: HTML.
      assets: names of style sheets and scripts in `report/assets`, to be written into the page
        after the theme, each once.
      height: see `Page`.
    """
    styles = ["page.css", *(name for name in dict.fromkeys(assets) if name.endswith(".css"))]
    scripts = [name for name in dict.fromkeys(assets) if name.endswith(".js")]
    head = "".join(f"<style>\n{asset(name)}</style>\n" for name in styles)
    tail = "".join(f"<script>\n{asset(name)}</script>\n" for name in scripts)
    html = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'  # none: a browser would ask for one, and report it
        f"<title>{escape(title)}</title>\n{head}</head>\n<body>\n{body}\n{tail}</body>\n</html>\n"
    )
    return Page(title, html, height)


def asset(name: str) -> str:
    """The text of a file in `report/assets`."""
    return resources.files("jaxdp.report").joinpath("assets", name).read_text(encoding="utf-8")
