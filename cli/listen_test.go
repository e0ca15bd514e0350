package cli

import "testing"

func TestListensOn(t *testing.T) {
	for listen, want := range map[string]string{
		":6443": "", "0.0.0.0:6443": "", "[::]:6443": "", "127.0.0.1:6443": "", "[::1]:6443": "",
		"10.0.0.5:6443": "10.0.0.5", "[fd00::5]:6443": "fd00::5", "[fe80::5%eth0]:6443": "fe80::5",
	} {
		if got := listensOn(listen); got != want {
			t.Errorf("%s: %q", listen, got)
		}
	}
}
