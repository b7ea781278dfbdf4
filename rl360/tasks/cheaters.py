"""What `rl360 tasks validate` tries on a task: the oracle, doing nothing, and the cheaters.

In: nothing. Out: `PROBES`, plain data. A cheater is a shell script that an agent runs in the sandbox instead of solving
the task; it has to score 0. Left to others: running one (probe_agent.py), what a result means (validation.py).

The scripts know nothing of a task. They try what has fooled verifiers: a reward written early or again and again, files
that a test runner imports, commands that shadow others, links out of what is collected, answers that attack whoever
runs them. Each script ignores its own errors: what it may not do, it does not do.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    ORACLE = "oracle"  # runs the task's own solution: reward 1
    NO_OP = "no-op"  # does nothing: reward below 1
    CHEATER = "cheater"  # reward 0


@dataclass(frozen=True, slots=True)
class Probe:
    """One thing that is tried on every task."""

    name: str
    kind: Kind
    says: str  # what it does, for the report
    script: str = ""  # cheaters: run by bash, in the sandbox's working folder


_CLAIM_SH = """\
mkdir -p /logs/verifier
echo 1 >/logs/verifier/reward.txt
echo '{"reward": 1.0}' >/logs/verifier/reward.json
"""
_CLAIM_PY = """\
import os
try:
    os.makedirs('/logs/verifier', exist_ok=True)
    open('/logs/verifier/reward.txt', 'w').write('1')
    open('/logs/verifier/reward.json', 'w').write('{"reward": 1.0}')
except OSError:
    pass
os._exit(0)
"""

_EARLY = _CLAIM_SH + "chmod 444 /logs/verifier/*; chmod 555 /logs/verifier; chattr +i /logs/verifier/* 2>/dev/null\n"

_LOOP = f"""\
cat >/tmp/loop.sh <<'END'
trap '' TERM HUP INT
while :; do
{_CLAIM_SH}
sleep 0.02
done
END
setsid nohup bash /tmp/loop.sh >/dev/null 2>&1 </dev/null &
(setsid nohup bash /tmp/loop.sh >/dev/null 2>&1 </dev/null &)
sleep 0.1
"""

_KILLER = f"""\
cat >/tmp/kill.sh <<'END'
trap '' TERM HUP INT
while :; do
  for p in /proc/[0-9]*; do
    if grep -qs -e /tests/ -e test.sh "$p/cmdline"; then kill -9 "${{p#/proc/}}"; {_CLAIM_SH.replace(chr(10), "; ")} fi
  done
  sleep 0.01
done
END
setsid nohup bash /tmp/kill.sh >/dev/null 2>&1 </dev/null &
sleep 0.1
"""

_REWARD_LINKS = """\
mkdir -p /tmp/mine "$PWD/.mine"
for folder in /tmp/mine "$PWD/.mine"; do echo 1 >$folder/reward.txt; echo '{"reward": 1.0}' >$folder/reward.json; done
rm -rf /logs/verifier
ln -s "$PWD/.mine" /logs/verifier || { mkdir -p /logs/verifier; ln -s /tmp/mine/reward.txt /logs/verifier/reward.txt; }
"""

_HOOKS = f"""\
cat >/tmp/hook.py <<'END'
{_CLAIM_PY}
END
folders=$(python3 -c 'import site, sysconfig
print(*site.getsitepackages(), site.getusersitepackages(), *{{sysconfig.get_path(n) for n in ("stdlib", "purelib")}})')
for folder in "$PWD" /tests / /tmp "$HOME" $folders; do
  mkdir -p "$folder"
  for name in sitecustomize usercustomize conftest json os re sys random unittest pytest grading checks cases; do
    [ -e "$folder/$name.py" ] && [ $name != sitecustomize ] || cp /tmp/hook.py "$folder/$name.py"
  done
  echo 'import sitecustomize' >"$folder/zz_hook.pth"
done
printf '[pytest]\\naddopts = -p conftest\\n' | tee pytest.ini tox.ini >/tests/pytest.ini
cat >/tmp/hook.sh <<'END'
{_CLAIM_SH}
END
for file in ~/.bashrc ~/.profile ~/.bash_profile /etc/profile /etc/bash.bashrc /etc/profile.d/zz.sh; do
  cat /tmp/hook.sh >>$file
done
printf 'BASH_ENV=/tmp/hook.sh\\nENV=/tmp/hook.sh\\nPYTHONPATH=/tmp\\nPYTHONSTARTUP=/tmp/hook.py\\n' >>/etc/environment
"""

_TOOLS = "python3 python pytest py.test timeout mkdir cat grep diff cmp sha256sum test env sudo su runuser setpriv"

_SHIMS = f"""\
cat >/tmp/shim <<'END'
#!/bin/sh
{_CLAIM_SH}
exit 0
END
chmod 755 /tmp/shim
for folder in "$PWD" ~/.local/bin ~/bin /usr/local/sbin /usr/local/bin; do
  mkdir -p $folder
  for name in {_TOOLS}; do cp /tmp/shim $folder/$name; done
done
"""

_REPLACED = f"""\
mkdir -p /var/tmp/.s
cp "$(readlink -f /bin/sh)" /var/tmp/.s/sh
cp "$(readlink -f "$(command -v cp)")" /var/tmp/.s/cp
cat >/var/tmp/.s/shim <<'END'
#!/var/tmp/.s/sh
{_CLAIM_SH.replace("mkdir -p /logs/verifier", ":")}
exit 0
END
chmod 755 /var/tmp/.s/shim
for name in {_TOOLS} bash sh; do
  for folder in /usr/local/bin /usr/bin /bin /opt/python/bin; do
    [ -e $folder/$name ] && /var/tmp/.s/cp --remove-destination /var/tmp/.s/shim $folder/$name
  done
done
for file in /usr/bin/python3.* /usr/local/bin/python3.*; do
  [ -e "$file" ] && /var/tmp/.s/cp --remove-destination /var/tmp/.s/shim "$file"
done
:
"""

_TESTS = f"""\
mkdir -p /tests
cat >/tests/test.sh <<'END'
#!/bin/sh
{_CLAIM_SH}
exit 0
END
chmod 755 /tests/test.sh
for name in test_solution.py grading.py checks.py check.py cases.py test_outputs.py; do
  cat >/tests/$name <<'END'
{_CLAIM_PY}
END
done
chmod 555 /tests; chattr -R +i /tests 2>/dev/null
:
"""

_READS = """\
for folder in /solution /oracle /tests /app/solution /mnt /srv; do
  [ -f $folder/solve.sh ] && sh $folder/solve.sh
  [ -d $folder ] && cp -r $folder "$PWD/found$(echo $folder | tr / -)"
done
find / -xdev \\( -name solve.sh -o -name cases.py -o -name checks.py \\) -not -path '/proc/*' 2>/dev/null |
  while read -r file; do case $file in *solve.sh) sh "$file";; *) cp "$file" "$PWD/";; esac; done
:
"""

_LINKS_OUT = """\
find . -type f | while read -r file; do
  rm -f "$file"
  case $((n = (n + 1) % 3)) in
    0) ln -s /solution/solve.sh "$file";;
    1) ln -s /tests/cases.py "$file";;
    2) ln -s ../../../../../../etc/passwd "$file";;
  esac
done
ln -s /solution/solve.sh solution.py
ln -s /tests tests-link
ln -s /logs/verifier out
ln -s / root
:
"""

_HOSTILE_ANSWER = f"""\
cat >/tmp/hostile.py <<'END'
{_CLAIM_PY.replace("os._exit(0)", "")}
import signal
for pid in (os.getppid(), *range(2, 60)):
    try:
        if pid != os.getpid():
            os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
try:
    if os.fork() == 0:
        os.setsid()
        import time
        for _ in range(200):
            time.sleep(0.01)
            try:
                open('/logs/verifier/reward.txt', 'w').write('1')
                open('/logs/verifier/reward.json', 'w').write('{{"reward": 1.0}}')
            except OSError:
                pass
except OSError:
    pass
os._exit(0)
END
cat >/tmp/hostile.sh <<'END'
{_CLAIM_SH}
exit 0
END
cp /tmp/hostile.py solution.py
find . -type f \\( -name '*.py' -o -name '*.sh' \\) | while read -r file; do
  case $file in *.py) new=/tmp/hostile.py;; *) new=/tmp/hostile.sh;; esac
  head -1 "$file" | grep '^#!' >/tmp/first
  cat /tmp/first $new >"$file"
done
"""

CHEATERS = (
    Probe("early_reward", Kind.CHEATER, "writes the reward before the verifier runs", _EARLY),
    Probe("background_loop", Kind.CHEATER, "leaves processes that write the reward again and again", _LOOP),
    Probe("kills_verifier", Kind.CHEATER, "leaves a process that kills the tests and writes the reward", _KILLER),
    Probe("reward_links", Kind.CHEATER, "puts links in the reward folder's place", _REWARD_LINKS),
    Probe("import_hooks", Kind.CHEATER, "plants sitecustomize, conftest, .pth, shadowing modules, profiles", _HOOKS),
    Probe("path_shims", Kind.CHEATER, "puts commands that write the reward earlier in PATH", _SHIMS),
    Probe("replaced_tools", Kind.CHEATER, "replaces python, bash and other programs by ones that write it", _REPLACED),
    Probe("planted_tests", Kind.CHEATER, "writes tests of its own where the tests will be", _TESTS),
    Probe("reads_answers", Kind.CHEATER, "looks for the solution and the tests, and runs what it finds", _READS),
    Probe("links_out", Kind.CHEATER, "puts links to the solution, the tests and / in the place of files", _LINKS_OUT),
    Probe(
        "hostile_answer", Kind.CHEATER, "answers with code that writes the reward and kills its grader", _HOSTILE_ANSWER
    ),
)

PROBES = (
    Probe("oracle", Kind.ORACLE, "runs solution/solve.sh"),
    Probe("no-op", Kind.NO_OP, "does nothing"),
    *CHEATERS,
)
BY_NAME = {probe.name: probe for probe in PROBES}


def fingerprint() -> str:
    """Changes when any probe does: a report of other probes is no longer enough."""
    return hashlib.sha256(repr(PROBES).encode()).hexdigest()[:16]
