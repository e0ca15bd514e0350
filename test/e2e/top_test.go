//go:build e2e

package e2e

import (
	"fmt"
	"regexp"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// TestTop: what the node and a pod use, from their control groups, on demand.
func TestTop(t *testing.T) {
	c := cluster.New(t)
	c.Import("hold.wasm", cluster.Module(t, "hold"))
	c.Apply(holder("held", 40, "", ""))
	c.WaitReady("app=held", 1)
	c.Eventually(60*time.Second, "usage is shown", func() error {
		pods, err := c.Try("top", "pods", "--sort-by", "memory")
		if err != nil {
			return err
		}
		nodes, err := c.Try("top", "nodes")
		if err != nil {
			return err
		}
		for pattern, out := range map[string]string{
			`(?m)^NAME +CPU\(cores\) +MEMORY\(bytes\)\nheld +[0-9]+m +4[0-9]Mi$`: pods,
			`(?m)^e2e +[1-9][0-9]*m +[0-9]+% +[1-9][0-9]*Mi +[0-9]+%$`:           nodes,
		} {
			if !regexp.MustCompile(pattern).MatchString(out) {
				return fmt.Errorf("no %s in:\n%s", pattern, out)
			}
		}
		return nil
	})
	if out, err := c.Try("top", "pods", "none"); err == nil {
		t.Errorf("a pod that is not there: %s", out)
	}
}
