"""The Dockerfile subset: what is understood, and that everything else fails with every problem named."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl360.sandboxes.local.dockerfile import DockerfileError, parse


def write(folder: Path, text: str, *files: str) -> Path:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    path = folder / "Dockerfile"
    path.write_text(text)
    return path


def test_every_supported_instruction(tmp_path: Path) -> None:
    text = """# syntax comment
FROM python:3.12-slim AS whatever
ENV A=1 B="two words"
ENV A=2 C=$A
ENV D rest of ${B:-x}
WORKDIR /app
WORKDIR sub
COPY --chown=1000:1000 a.txt b.txt ./
COPY data /data
RUN echo one && \\
    # a comment inside
    echo two
RUN ["echo", "a b"]
USER agent
CMD ["sleep", "infinity"]
EXPOSE 80
LABEL x=y
"""
    image = parse(write(tmp_path, text, "a.txt", "b.txt", "data/c.txt"))
    assert image.base == "python:3.12-slim"
    # Docker expands a line with the values before it, so C is the old A.
    assert image.env == {"A": "2", "B": "two words", "C": "1", "D": "rest of two words"}
    assert (image.workdir, image.user) == ("/app/sub", "agent")
    kinds = [(s.kind, s.command or s.target) for s in image.steps]
    assert kinds[:4] == [("mkdir", "/app"), ("mkdir", "/app/sub"), ("copy", "/app/sub/"), ("copy", "/data")]
    assert image.steps[2].sources == ("a.txt", "b.txt")
    assert image.steps[2].chown == "1000:1000"
    assert " ".join(image.steps[4].command.split()) == "echo one && echo two"
    assert image.steps[5].command == "echo 'a b'"
    assert image.steps[4].workdir == "/app/sub"
    assert dict(image.steps[4].env)["A"] == "2"


@pytest.mark.parametrize(
    "line",
    [
        "ADD http://x/y /y", "ARG X=1", 'ENTRYPOINT ["x"]', "SHELL [\"/bin/zsh\"]", "VOLUME /x", "HEALTHCHECK CMD x",
        "ONBUILD RUN x", "STOPSIGNAL 9", "FROM other", "COPY --from=build /a /b", "COPY missing /x", "COPY ../up /x",
        "RUN --mount=type=cache,target=/x true", "RUN <<EOF", "COPY a.txt b.txt /x", "ENV A", "NONSENSE",
    ],
)  # fmt: skip
def test_anything_else_fails(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, f"FROM x\n{line}\n", "a.txt", "b.txt")
    with pytest.raises(DockerfileError) as error:
        parse(path)
    assert len(error.value.problems) == 1
    assert "line 2" in error.value.problems[0]


def test_all_problems_at_once(tmp_path: Path) -> None:
    with pytest.raises(DockerfileError) as error:
        parse(write(tmp_path, "ARG A\nFROM x\nADD a b\nCOPY nothing /x\n"))
    assert [p.split(":")[0] for p in error.value.problems] == ["line 1", "line 1", "line 3", "line 4"]


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/shadow")
    with pytest.raises(DockerfileError, match="outside"):
        parse(write(tmp_path, "FROM x\nCOPY link /x\n"))


def test_ignore_file_is_refused_where_it_would_matter(tmp_path: Path) -> None:
    path = write(tmp_path, "FROM x\nCOPY data /x\n", "data/a", ".dockerignore")
    with pytest.raises(DockerfileError, match=r"\.dockerignore"):
        parse(path)


INSTRUCTIONS = st.sampled_from(["FROM", "ENV", "WORKDIR", "COPY", "RUN", "USER", "CMD", "ARG", "", "#"])
LINES = st.tuples(INSTRUCTIONS, st.text(alphabet="ab $={}\"'[]\\<-.,/*:\x00\n", max_size=30)).map(" ".join)


@given(st.lists(LINES, max_size=6))
def test_any_text_parses_or_says_why(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> None:
    path = tmp_path_factory.mktemp("dockerfile") / "Dockerfile"
    path.write_text("FROM x\n" + "\n".join(lines))
    problems: list[str] = []
    image = None
    try:
        image = parse(path)
    except DockerfileError as error:
        problems = error.problems
    assert bool(problems) != (image is not None)
