package cli

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dunlin-project/dunlin/cli/client"
	"github.com/dunlin-project/dunlin/node/board"
	"github.com/dunlin-project/dunlin/node/network"
	"github.com/dunlin-project/dunlin/runtime/cgroup"
	"github.com/dunlin-project/dunlin/runtime/wasm"
)

func (a *app) printKubeconfig(path bool) error {
	c, err := client.Load(a.kubeconfig)
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
network namespaces, container runtimes. Exits with 1 if something would keep
workloads from running as asked.`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			f := board.Read("/", o.state)
			tree := cgroup.New(cgroup.Config{Name: "dunlin-preflight"})
			cg := tree.Facts()
			defer func() { _ = tree.Destroy() }()
			f.CgroupMemory, f.CgroupReason = cg.Memory, strings.TrimSpace(cg.Reason+" "+cg.MemoryReason)
			if err := network.Usable(); err != nil {
				f.NetworkReason = err.Error()
			}
			if o.name != "" {
				f.Hostname = o.name
			}
			return a.printFindings(board.Check(f))
		},
	}
	o.add(c)
	return c
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

func (a *app) importCmd() *cobra.Command {
	var o nodeOptions
	c := &cobra.Command{
		Use:   "import NAME FILE.wasm",
		Short: "Give this node a module under a name that manifests use as image",
		Long: `Give this node a module under a name that manifests use as image.

The module is checked and compiled now, so that pods start at once. Run it on
every node that shall run the module. '-' reads standard input.`,
		Example: `  dunlin import hello.wasm ./hello.wasm     # then: image: hello.wasm`,
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.importModule(cmd.Context(), o, args[0], args[1])
		},
	}
	o.add(c)
	return c
}

func (a *app) importModule(ctx context.Context, o nodeOptions, name, file string) error {
	rt, err := wasm.New(wasm.Config{StateDir: filepath.Join(o.state, "wasm"), RunDir: filepath.Join(o.run, "wasm"), Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	defer func() { _ = rt.Close() }()
	if file == "-" {
		_, err = rt.Store().Import(ctx, name, "", a.in)
	} else {
		_, err = rt.Store().ImportFile(ctx, name, file)
	}
	if err != nil {
		return err
	}
	st, err := rt.Prepare(ctx, name, "Never", func(m string) { a.notef("%s %s ...\n", m, name) })
	if err != nil {
		return err
	}
	a.printf("%s %s (%d bytes)\n", name, st.Digest, st.Size)
	if _, err := os.Stat(agentSocket(o.run)); err != nil {
		a.notef("Note: no agent runs here with --run-dir %s; the module was kept in %s for one that is started with that --state-dir.\n", o.run, o.state)
	}
	return nil
}
