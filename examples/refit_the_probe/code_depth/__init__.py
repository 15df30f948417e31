"""`paper-code-depth`: depth of brackets and indents in real Python, read from frozen language models."""
