#!/bin/sh
cd /app || exit 1
# Retired first: shelf B1 has no room for everything at once.
python3 inventory list | while read -r number shelf quantity name; do
  if [ "$quantity" = 0 ]; then python3 inventory retire "$number" --reason empty; fi
done
python3 inventory list --shelf A3 | while read -r number rest; do python3 inventory move "$number" --to B1; done
python3 inventory count K-104 9
python3 inventory export --format csv export.csv
