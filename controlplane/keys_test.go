package controlplane

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/dunlin-project/dunlin/internal/clock"
)

// What nothing can replace is not made anew where there is a cluster: the
// server says what is missing, and leaves what is there.
func TestMissingKeysOfACluster(t *testing.T) {
	dir := t.TempDir()
	s := startServer(t, "one", dir, nil)
	eventually(t, "a Secret is made", func() error { // the namespace comes first
		code, body, _ := s.do(s.admin, http.MethodPost, "/api/v1/namespaces/default/secrets",
			map[string]any{"apiVersion": "v1", "kind": "Secret", "metadata": map[string]any{"name": "ss"}, "stringData": map[string]any{"k": "v"}})
		if code != http.StatusCreated {
			return fmt.Errorf("%d %s", code, body)
		}
		return nil
	})
	s.stop()
	read := func() map[string][]byte {
		out := map[string][]byte{}
		files, err := filepath.Glob(filepath.Join(dir, "pki", "*"))
		must(t, err)
		for _, f := range files {
			b, err := os.ReadFile(f)
			must(t, err)
			out[filepath.Base(f)] = b
		}
		return out
	}
	open := func(change func(*Config)) error {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		must(t, err)
		defer func() { _ = l.Close() }()
		c := Config{StateDir: dir, Listener: l, Advertise: []string{l.Addr().String()}, Name: "one", Clock: clock.System, Log: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry()}
		if change != nil {
			change(&c)
		}
		again, err := New(t.Context(), c)
		if err == nil {
			err = again.close()
		}
		return err
	}
	whole := read()
	for _, tc := range []struct {
		name, says string
	}{{"ca.key", "backup"}, {"ca.crt", "backup"}, {"seal.key", "--new-seal-key"}} {
		for _, f := range []string{tc.name, tc.name + ".copy"} {
			must(t, os.Remove(filepath.Join(dir, "pki", f)))
		}
		before := read()
		if err := open(nil); err == nil || !strings.Contains(err.Error(), tc.says) {
			t.Errorf("without %s: %v", tc.name, err)
		}
		for f, b := range read() {
			if !bytes.Equal(b, before[f]) {
				t.Errorf("without %s, %s was changed", tc.name, f)
			}
		}
		if tc.name == "seal.key" {
			must(t, os.WriteFile(filepath.Join(dir, "pki", "seal.key"), nil, 0o600))
			if err := open(nil); !errors.Is(err, ErrNoSealKey) {
				t.Errorf("an empty %s: %v", tc.name, err)
			}
			must(t, open(func(c *Config) { c.NewSealKey = true }))
			s := startServer(t, "one", dir, nil)
			const secret = "/api/v1/namespaces/default/secrets/ss"
			if code, body, _ := s.do(s.admin, http.MethodGet, secret, nil); code != http.StatusInternalServerError || !strings.Contains(body, "seal key") {
				t.Errorf("a Secret of the lost key: %d %s", code, body)
			}
			if code, body, _ := s.do(s.admin, http.MethodDelete, secret, nil); code != http.StatusOK {
				t.Errorf("a Secret of the lost key is not deleted: %d %s", code, body)
			}
			s.stop()
		}
		for f, b := range whole {
			must(t, os.WriteFile(filepath.Join(dir, "pki", f), b, 0o600))
		}
		must(t, open(nil))
	}
}

// A key that signs is kept twice; only where both are damaged there is a new
// one, and the caller is told.
func TestDamagedTokenKey(t *testing.T) {
	path := filepath.Join(t.TempDir(), "service-account.key")
	first, damaged, err := loadOrCreateKey(path)
	if err != nil || damaged != "" {
		t.Fatal(damaged, err)
	}
	damage := func(p string) {
		t.Helper()
		if err := os.Truncate(p, 100); err != nil {
			t.Fatal(err)
		}
	}
	for _, p := range []string{path, path + ".copy"} {
		damage(p)
		if k, damaged, err := loadOrCreateKey(path); err != nil || damaged != "" || !k.Equal(first) {
			t.Fatalf("%s damaged: another key, %q, %v", p, damaged, err)
		}
	}
	if err := os.Remove(path + ".copy"); err != nil { // as before there was one
		t.Fatal(err)
	}
	if k, _, err := loadOrCreateKey(path); err != nil || !k.Equal(first) {
		t.Fatal(err)
	}
	damage(path)
	damage(path + ".copy")
	second, damaged, err := loadOrCreateKey(path)
	if err != nil || damaged != path+".damaged" || second.Equal(first) {
		t.Fatalf("both damaged: %q, %v", damaged, err)
	}
	if k, damaged, err := loadOrCreateKey(path); err != nil || damaged != "" || !k.Equal(second) {
		t.Fatalf("after that: %q, %v", damaged, err)
	}
}
