package cli

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/dunlin-project/dunlin/runtime/wasm"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

func (a *app) runCmd() *cobra.Command {
	var o wasm.ForegroundOptions
	var mounts []string
	var memory string
	c := &cobra.Command{
		Use:   "run MODULE.wasm [-- ARG...]",
		Short: "Run one module in the foreground, in the same sandbox as a pod",
		Long: `Run one module in the foreground, in the same sandbox as a pod.

The guest sees nothing but what it is given: no files without --mount, no
network without --port. The exit code is the guest's; 130 or 143 when SIGINT or
SIGTERM ended the command before the guest began.`,
		Example: `  dunlin run app.wasm -- --verbose
  dunlin run hello.wasm --port 8080
  dunlin run convert.wasm --mount ./in:/in:ro --mount ./out:/out --memory 64Mi`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.Path, o.Args = args[0], args[1:]
			for _, m := range mounts {
				parsed, err := parseMount(m)
				if err != nil {
					return err
				}
				o.Mounts = append(o.Mounts, parsed)
			}
			for _, p := range o.Ports {
				if _, err := strconv.ParseUint(p, 10, 16); err == nil {
					continue
				}
				if err := checkAddress("port", p); err != nil {
					return usagef("--port=%s: a port such as 8080, or an address with one, such as 0.0.0.0:8080, is wanted", p)
				}
			}
			for _, e := range o.Env {
				if k, _, ok := strings.Cut(e, "="); !ok || k == "" {
					return usagef("--env=%s: must be KEY=VALUE", e)
				}
			}
			if memory != "" {
				q, err := resource.ParseQuantity(memory)
				if err != nil || q.Value() < 64<<10 {
					return usagef("--memory=%s: must be an amount such as 64Mi, at least 64Ki", memory)
				}
				o.MemoryLimit = q.Value()
			}
			o.Progress = func(step string) { a.notef("%s %s, the first time only ...\n", step, o.Path) }
			o.Warn = func(s string) { a.notef("Note: %s\n", s) }
			o.Started = func(addresses []string) {
				for _, ad := range addresses {
					a.notef("Listening on %s\n", ad)
				}
			}
			code, err := wasm.RunForeground(cmd.Context(), o)
			if errors.Is(err, wasm.ErrMemoryLimit) {
				_, _ = fmt.Fprintf(a.errw, "Error: %s: %v\n", o.Path, err)
				return exitCode(code)
			}
			if err != nil {
				return interrupted(cmd.Context(), err, o.Path+" was not started")
			}
			if code != 0 {
				return exitCode(code)
			}
			return nil
		},
	}
	f := c.Flags()
	f.StringArrayVar(&o.Env, "env", nil, "environment variable for the guest: KEY=VALUE")
	f.StringArrayVar(&mounts, "mount", nil, "folder for the guest: HOST:GUEST or HOST:GUEST:ro")
	f.StringSliceVar(&o.Ports, "port", nil, "TCP port, or address:port, handed to the guest as a listener")
	f.StringVar(&memory, "memory", "", "memory limit, such as 64Mi")
	return c
}

func parseMount(s string) (workload.Mount, error) {
	parts := strings.Split(s, ":")
	if len(parts) < 2 || len(parts) > 3 || parts[0] == "" || !strings.HasPrefix(parts[1], "/") || (len(parts) == 3 && parts[2] != "ro" && parts[2] != "rw") {
		return workload.Mount{}, usagef("--mount=%s: must be HOST:GUEST or HOST:GUEST:ro, with an absolute GUEST", s)
	}
	return workload.Mount{Source: parts[0], Target: parts[1], ReadOnly: len(parts) == 3 && parts[2] == "ro"}, nil
}
