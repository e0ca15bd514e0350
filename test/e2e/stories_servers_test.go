//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// TestStory01AllServersDie: with every server killed guests run on, for longer
// than any lease, a Service answers on its node and on others, and an agent
// that is started meanwhile adopts its own. One server alone changes nothing;
// when there is a quorum nothing is started again and nodes are Ready.
func TestStory01AllServersDie(t *testing.T) {
	c := newCrew(t, 4)
	c.agents[0].Import("hello.wasm", filepath.Join(cluster.Root(t), "bin", "examples", "hello.wasm"))
	pinned := strings.Replace(hello("1", 1), "runtimeClassName: wasm", "runtimeClassName: wasm\n      nodeSelector: {kubernetes.io/hostname: n1}", 1)
	if _, err := c.TryIn(0, pinned+"---\n"+helloService, "apply", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	c.Eventually(time.Minute, "hello runs", func() error { _, err := onePod(c.Servers, "hello"); return err })
	c.beside = 1
	c.rest()
	var svc corev1.Service
	if err := getJSON(c.Servers, "service/hello", &svc); err != nil {
		t.Fatal(err)
	}
	answers := func(when string) {
		t.Helper()
		patiently(t, "the Service answers "+when, func() error {
			_, err := getOn(c.machines[0].Path(), "http://"+svc.Spec.ClusterIP+"/")
			for _, m := range c.machines {
				_, more := get(fmt.Sprintf("http://%s:%d/", m.IP, svc.Spec.Ports[0].NodePort))
				err = errors.Join(err, more)
			}
			return err
		})
	}
	guests := func(when string) {
		t.Helper()
		now := map[string]int{}
		for _, a := range c.agents {
			maps.Copy(now, a.HostPIDs())
		}
		if !maps.Equal(now, c.guests) {
			t.Fatalf("%s: guests are %v, were %v", when, now, c.guests)
		}
	}
	answers("at first")
	c.each(func(i int) {
		for _, s := range c.List {
			s.Stop(syscall.SIGKILL)
		}
		restarted := c.agents[1+i%2]
		restarted.Stop(syscall.SIGKILL)
		restarted.Start()
		pause(t, 10*time.Second)
		guests("without servers")
		for _, a := range c.agents {
			c.Eventually(30*time.Second, a.Name+" says that it is cut off", func() error {
				if s, err := a.Status(); err != nil || s.Connected {
					return fmt.Errorf("%+v, %v", s, err)
				}
				return nil
			})
		}
		answers("without servers")

		c.List[0].Start()
		c.Eventually(time.Minute, "a server alone refuses a write for want of a quorum", func() error {
			_, err := c.TryIn(0, configMap("never"), "apply", "-f", "-")
			if err == nil {
				t.Fatal("it took one")
			}
			if !strings.Contains(err.Error(), "quorum") {
				return err
			}
			return nil
		})
		guests("with one server")
		answers("with one server")
		c.List[1].Start()
		c.List[2].Start()
		c.Roles(3, 3)
		c.same("with servers again")
		if _, err := c.Try(0, "get", "configmap", "never"); err == nil {
			t.Error("a refused write was made after all")
		}
		answers("with servers again")
	})
}
