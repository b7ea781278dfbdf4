# What looks like a failure of the machine, and is the agent's doing.

#== folder-where-the-script-goes
for i in 1 2 3 4 5 6 7 8 9; do mkdir /.rl360/$i.sh /.rl360/$i.out /.rl360/$i.cmd; done

#== folder-where-every-script-goes
python3 -c 'import os
if os.fork() == 0:
    os.setsid()
    while True:
        for name in os.listdir("/.rl360"):
            for suffix in ("sh", "out", "err"):
                try: os.mkdir("/.rl360/" + name.split(".")[0] + "." + suffix)
                except OSError: pass' > /dev/null 2>&1

#== fills-the-control-folder
head -c 70000000 /dev/zero > /.rl360/big

#== all-inodes-of-the-control-folder
cd /.rl360; python3 -c 'import os
for i in range(30000):
    os.mkdir(f"{i}")'

#== stops-the-shell
for p in /proc/[0-9]*; do
    p=${p#/proc/}
    [ "$p" != 1 ] && [ "$p" != $$ ] && kill -STOP $p
done; true

#== logs-are-files
rm -rf /logs /tests; touch /logs /tests

#== deep-tests-folder
python3 -c 'import os
for at in ("/tests", "/logs/verifier", "/logs/agent", "/logs/artifacts"):
    os.makedirs(at, exist_ok=True)
    os.chdir(at)
    for i in range(1500):
        os.mkdir("d")
        os.chdir("d")'

#== long-paths
python3 -c 'import os
os.chdir("/app")
for i in range(25):
    os.mkdir("d" * 250)
    os.chdir("d" * 250)
os.symlink("x", "link")'

#== empty-folders
python3 -c 'import os
for i in range(120000):
    try: os.mkdir(f"/app/{i}")
    except OSError: break'

#== link-with-an-odd-name
ln -s /etc/passwd $'/app/\xff'; mkfifo $'/logs/artifacts/\xfe'

#== no-users
rm -f /etc/passwd /etc/group; echo 'root:x:zero:zero::/:' > /etc/passwd

#== no-folder
cd /; rm -rf /app

#== folder-is-a-file
cd /; rm -rf /app; touch /app
