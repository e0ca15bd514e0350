package cli

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/cli/client"
)

// consoleOptions are those of exec and attach.
type consoleOptions struct {
	container  string
	stdin, tty bool
}

func (o *consoleOptions) flags(c *cobra.Command) {
	c.Flags().StringVarP(&o.container, "container", "c", "", "container (default: that of the annotation kubectl.kubernetes.io/default-container, or the first)")
	c.Flags().BoolVarP(&o.stdin, "stdin", "i", false, "pass this command's input on")
	c.Flags().BoolVarP(&o.tty, "tty", "t", false, "be a terminal, with -i")
}

func (a *app) execCmd() *cobra.Command {
	var o consoleOptions
	c := &cobra.Command{
		Use:   "exec (POD | TYPE/NAME) -- COMMAND [ARG...]",
		Short: "Run a command in a container",
		Long: `Run a command in a container.

The exit code is the command's. A Wasm guest is one module, with no other
programs beside it: there is nothing to exec in it.`,
		Example: `  dunlin exec web -- ls -l /www
  dunlin exec -it deploy/web -c side -- sh
  dunlin exec -i web -- tar xf - < files.tar`,
		Args:              cobra.MinimumNArgs(2),
		ValidArgsFunction: a.completePods,
		RunE: func(cmd *cobra.Command, args []string) error {
			if cmd.ArgsLenAtDash() != 1 {
				return usagef("one pod, '--' and then the command are wanted: %s %s -- %s", cmd.CommandPath(), args[0], strings.Join(args[1:], " "))
			}
			return a.console(cmd.Context(), "exec", args[0], args[1:], o)
		},
	}
	o.flags(c)
	return a.namespaced(c)
}

func (a *app) attachCmd() *cobra.Command {
	var o consoleOptions
	c := &cobra.Command{
		Use:   "attach (POD | TYPE/NAME)",
		Short: "Join the output, and with -i the input, of a running container",
		Long: `Join the output, and with -i the input, of a running container.

What it wrote before is in 'dunlin logs'. Input needs "stdin: true" in the
container's manifest, a terminal "tty: true".`,
		Example: `  dunlin attach web
  dunlin attach -it shell -c main`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completePods,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.console(cmd.Context(), "attach", args[0], nil, o)
		},
	}
	o.flags(c)
	return a.namespaced(c)
}

// console carries one exec or attach.
func (a *app) console(ctx context.Context, kind, what string, command []string, o consoleOptions) error {
	c, p, err := a.pod(ctx, what)
	if err != nil {
		return err
	}
	con := &client.Console{Out: a.out, Err: a.errw}
	ct := a.container(p, o.container)
	if kind == "attach" && o.stdin {
		switch {
		case ct == nil: // the server says what is wrong
		case !ct.Stdin:
			return fmt.Errorf("container %s of pod %s has no input: its manifest needs \"stdin: true\"", ct.Name, p.Name)
		case o.tty && !ct.TTY:
			o.tty = false
			a.notef("Note: container %s has no terminal: its manifest says no \"tty: true\".\n", ct.Name)
		}
	}
	if ct != nil {
		o.container = ct.Name
	}
	if o.stdin {
		con.In = a.in
	}
	if o.tty {
		t, err := a.terminal(o.stdin)
		if err != nil {
			return err
		}
		if t != nil {
			defer t.restore()
			con.Sizes = t.sizes
			if kind == "attach" {
				a.notef("If there is no prompt, press enter.\r\n")
			}
		}
	}
	return a.remote(ctx, c, p, kind, o.container, command, con)
}

// remote runs con; an exit code other than 0 is an exitCode.
func (a *app) remote(ctx context.Context, c *client.Client, p *corev1.Pod, kind, container string, command []string, con *client.Console) error {
	q := url.Values{"container": {container}}
	if kind == "exec" {
		q["command"] = command
	}
	code, err := con.Run(ctx, c, podPath(p.Namespace, p.Name)+"/"+kind, q)
	if err != nil {
		return err
	}
	if code != 0 {
		return exitCode(code)
	}
	return nil
}

// pod gets the pod that is meant, by its name or its workload's.
func (a *app) pod(ctx context.Context, what string) (*client.Client, *corev1.Pod, error) {
	c, err := a.client()
	if err != nil {
		return nil, nil, err
	}
	if strings.Contains(what, "/") {
		if what, err = a.podOf(ctx, c, what); err != nil {
			return nil, nil, err
		}
	}
	p := &corev1.Pod{}
	if err := c.JSON(ctx, client.Request{Method: http.MethodGet, Path: podPath(c.Namespace, what)}, p); err != nil {
		return nil, nil, err
	}
	return c, p, nil
}

// container is the one that is meant; with a note if that had to be chosen.
// nil is one that the pod does not have.
func (a *app) container(p *corev1.Pod, name string) *corev1.Container {
	all := p.Spec.Containers
	chosen := name == "" && len(all) > 1
	if chosen && p.Annotations["kubectl.kubernetes.io/default-container"] != "" {
		name, chosen = p.Annotations["kubectl.kubernetes.io/default-container"], false
	}
	if chosen {
		var names []string
		for i := range all {
			names = append(names, all[i].Name)
		}
		a.notef("Defaulted container %q out of: %s\n", names[0], strings.Join(names, ", "))
	}
	if name == "" {
		return &all[0]
	}
	all = append(all[:len(all):len(all)], p.Spec.InitContainers...)
	for i := range p.Spec.EphemeralContainers {
		all = append(all, corev1.Container(p.Spec.EphemeralContainers[i].EphemeralContainerCommon))
	}
	for i := range all {
		if all[i].Name == name {
			return &all[i]
		}
	}
	return nil
}
