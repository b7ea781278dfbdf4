# What the agent leaves on its disk.

#== fills-the-disk
dd if=/dev/zero of=/app/big bs=1M
dd if=/dev/zero of=/var/big bs=4k
echo x > /app/more

#== fills-another-folder
dd if=/dev/zero of=/var/tmp/big bs=1M

#== one-hole
truncate -s 8T /app/hole /app/data/hole

#== many-files
python3 -c 'import os
for i in range(30000):
    os.close(os.open(f"/app/{i}", os.O_CREAT))'

#== deep-folders
cd /app
for i in $(seq 300); do mkdir d && cd d || break; done

#== odd-names
cd /app
touch -- "$(printf 'x%.0s' $(seq 255))" $'new\nline' $'\xff\xfe' -rf '*' ' '

#== one-file-many-names
dd if=/dev/zero of=/app/big bs=1M count=8
for i in $(seq 200); do ln /app/big /app/big$i; done
