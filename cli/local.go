package cli

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dunlin-project/dunlin/node/board"
	"github.com/dunlin-project/dunlin/node/network"
	"github.com/dunlin-project/dunlin/runtime/cgroup"
	"github.com/dunlin-project/dunlin/runtime/oci"
)

func (a *app) printKubeconfig(path bool) error {
	c, err := a.config()
	if err != nil {
		return err
	}
	if path {
		a.printf("%s\n", c.Path)
		return nil
	}
	b, err := os.ReadFile(c.Path)
	if err != nil {
		return fmt.Errorf("read kubeconfig: %w", err)
	}
	a.printf("%s", b)
	return nil
}

func (a *app) preflightCmd() *cobra.Command {
	var o nodeOptions
	c := &cobra.Command{
		Use:   "preflight",
		Short: "Check this machine, and say what to change where",
		Long: `Check this machine, and say what to change where.

Looks at what really works, not at what is configured: memory cgroup, clock,
architecture of the user space, page size, swap, memory, disk, hostname,
network namespaces, runtimes (a container is made, not run). Exits with 1 if something would keep
workloads from running as asked.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			f := board.Read("/", o.state)
			tree := cgroup.New(cgroup.Config{Name: "dunlin-preflight"})
			cg := tree.Facts()
			defer func() { _ = tree.Destroy() }()
			f.CgroupMemory, f.CgroupReason = cg.Memory, whyNoLimits(cg)
			if err := network.Usable(); err != nil {
				f.NetworkReason = err.Error()
			}
			f.OCI, f.OCIReason = findOCI(cmd.Context(), tree)
			if o.name != "" {
				f.Hostname = o.name
			}
			return a.printFindings(board.Check(f))
		},
	}
	o.add(c)
	return c
}

// whyNoLimits is one line: why memory limits are not enforced.
func whyNoLimits(f cgroup.Facts) string {
	why := strings.TrimPrefix(cmp.Or(f.MemoryReason, f.Reason), "memory limits are not enforced: ")
	return strings.ReplaceAll(why, "\n", "; ")
}

// findOCI makes a container, as the agent does at its start, and says what with
// or why not.
func findOCI(ctx context.Context, tree *cgroup.Tree) (programs, reason string) {
	dir, err := os.MkdirTemp("", "dunlin-preflight-")
	if err != nil {
		return "", err.Error()
	}
	defer func() { _ = os.RemoveAll(dir) }()
	p, err := oci.Find(ctx, dir, tree)
	if err != nil {
		return "", err.Error()
	}
	return p.Version + " and conmon", ""
}

func (a *app) printFindings(list []board.Finding) error {
	failed := 0
	for _, f := range list {
		a.printf("%-8s %-14s %s\n", f.Level, f.Check, f.Says)
		if f.Do != "" && f.Level > board.OK {
			a.printf("%-8s %-14s → %s\n", "", "", f.Do)
		}
		if f.Level == board.Fatal {
			failed++
		}
	}
	if failed > 0 {
		return fmt.Errorf("%d of %d checks failed", failed, len(list))
	}
	return nil
}
