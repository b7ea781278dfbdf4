#!/bin/sh
cat >/app/rotate.sh <<'END'
#!/bin/sh
# Delete all but the newest logs of a folder.
LC_ALL=C
export LC_ALL
usage() {
  echo "usage: rotate.sh FOLDER KEEP" >&2
  exit 2
}
[ $# -eq 2 ] || usage
[ -d "$1" ] || usage
case $2 in '' | *[!0-9]*) usage ;; esac
keep=$2
cd -- "$1" || usage
count=0
for file in *.log; do
  if [ -f "$file" ] && [ ! -L "$file" ]; then count=$((count + 1)); fi
done
for file in *.log; do
  if [ ! -f "$file" ] || [ -L "$file" ]; then continue; fi
  [ "$count" -gt "$keep" ] || break
  rm -- "$file"
  printf '%s\n' "$file"
  count=$((count - 1))
done
END
