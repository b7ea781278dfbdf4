"""What the log that the task gives says."""

WANT = {'requests': 300,
 'server_errors': 37,
 'bytes': 1269991,
 'top_client': '10.0.2.4',
 'slowest_path': '/api/v1/orders',
 'not_found_clients': ['10.0.0.17',
                       '10.0.0.23',
                       '10.0.0.4',
                       '10.0.0.9',
                       '10.0.1.17',
                       '10.0.1.23',
                       '10.0.1.4',
                       '10.0.1.9',
                       '10.0.2.4',
                       '10.0.2.9']}


def check_summary(work):
    got = work.json("summary.json")
    equal(sorted(got) if isinstance(got, dict) else got, sorted(WANT), "keys of summary.json")
    for key, want in WANT.items():
        equal(got[key], want, key)
