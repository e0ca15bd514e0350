package ingress

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dunlin-project/dunlin/wire"
)

// A process that is not wanted any more while it starts does not stay.
func TestNotWantedWhileItStarts(t *testing.T) {
	w := newWorld(t)
	w.service("a", false, backend(t, says("a")))
	w.rule("a", "a.example", "/", "a")
	for range 3 {
		_ = os.Remove(filepath.Join(w.dir, "stderr"))
		w.item(wire.ItemIngressNodes, &wire.IngressNodes{Nodes: []string{"n"}})
		w.publish()
		w.eventually("a process starts", func() error { // its stderr is opened first
			_, err := os.Stat(filepath.Join(w.dir, "stderr"))
			if len(processesIn(w.dir)) > 0 {
				return nil // of the round before, which was not seen to be over
			}
			return err
		})
		w.item(wire.ItemIngressNodes, &wire.IngressNodes{})
		w.publish()
		w.eventually("no process", func() error {
			if pids := processesIn(w.dir); len(pids) > 0 {
				return fmt.Errorf("there is %s", pids)
			}
			if _, err := os.Stat(filepath.Join(w.dir, "socket")); err == nil {
				return errThere
			}
			return nil
		})
	}
}

// A process that cannot see what is made in the place of its folder is followed
// by another one.
func TestARemovedFolderIsMadeAgain(t *testing.T) {
	w := newWorld(t)
	w.service("a", false, backend(t, says("a")))
	w.rule("a", "a.example", "/", "a")
	w.publish()
	w.expect(w.client(), "http://a.example/", 200, "a")
	if err := os.RemoveAll(w.dir); err != nil {
		t.Fatal(err)
	}
	w.eventually("a process answers in the folder", func() error { _, err := Ask(w.dir); return err })
	w.eventually("Ingresses are served", func() error {
		status, body, err := get(w.client(), "http://a.example/")
		if err == nil && (status != 200 || body != "a") {
			err = fmt.Errorf("%d %s", status, body)
		}
		return err
	})
}

// processesIn are those with the folder as their first argument.
func processesIn(dir string) (pids []string) {
	list, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, f := range list {
		b, err := os.ReadFile(f)
		if args := bytes.Split(b, []byte{0}); err == nil && len(args) > 1 && string(args[1]) == dir {
			pids = append(pids, strings.Split(f, "/")[2])
		}
	}
	return pids
}
