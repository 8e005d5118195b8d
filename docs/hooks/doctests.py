"""Docstrings as they are written here, made into Markdown.

Doctests become code blocks, blocks after a double colon too, and the roles of reStructuredText plain
code.
"""

import re

import griffe

# A doctest: from a line that starts with >>> up to the next blank line or the end.
_DOCTEST = re.compile(r"^( *)>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)
# A literal block: a line that ends in a double colon, and the indented lines after it.
_LITERAL = re.compile(r"^( *)(\S.*):: *\n\s*\n((?:\1 +\S.*\n?|\s*\n(?=\1 ))+)", re.MULTILINE)
_ROLE = re.compile(r":(?:func|class|meth|mod|attr):(?=`)")


class Markdown(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_instance(self, *, obj, **kwargs):
        if obj.docstring is not None:
            text = _LITERAL.sub(r"\1\2:\n\n\1```python\n\3\n\1```\n", obj.docstring.value)
            text = _DOCTEST.sub(r"\1```pycon\n\g<0>\n\1```", text)
            obj.docstring.value = _ROLE.sub("", text)
