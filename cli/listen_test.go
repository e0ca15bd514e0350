package cli

import (
	"context"
	"errors"
	"fmt"
	"net"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// portTaken fails as Listen does while another process has the port.
func portTaken() error {
	return &net.OpError{Op: "listen", Err: fmt.Errorf("bind: %w", syscall.EADDRINUSE)}
}

func TestAStartWaitsForItsPort(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tries := 0
		_, err := untilFree(t.Context(), func() (net.Listener, error) {
			if tries++; tries < 5 {
				return nil, portTaken()
			}
			return nil, nil
		})
		if err != nil || tries != 5 {
			t.Errorf("%d tries, %v", tries, err)
		}

		start := time.Now()
		_, err = untilFree(t.Context(), func() (net.Listener, error) { return nil, portTaken() })
		if !errors.Is(err, syscall.EADDRINUSE) || time.Since(start) != portWait {
			t.Errorf("a port that stays taken: %v after %s", err, time.Since(start))
		}

		other := errors.New("no such address")
		tries = 0
		_, err = untilFree(t.Context(), func() (net.Listener, error) { tries++; return nil, other })
		if !errors.Is(err, other) || tries != 1 {
			t.Errorf("%d tries, %v", tries, err)
		}

		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		start = time.Now()
		if _, err = untilFree(ctx, func() (net.Listener, error) { return nil, portTaken() }); err == nil || time.Since(start) != 0 {
			t.Errorf("after an interrupt: %v after %s", err, time.Since(start))
		}
	})
}

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
