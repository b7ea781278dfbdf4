#!/bin/sh
# Delete all but the newest logs of a folder.
cd $1
count=$(ls | wc -l)
for file in $(ls); do
  if [ $count -ge $2 ]; then
    rm -rf $file
  fi
  count=$((count - 1))
done
