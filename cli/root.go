// Package cli holds the commands of the dunlin binary: flags, output and
// progress. Commands that talk to a cluster are thin clients of its API; the
// server prints the tables and does the merging.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/dunlin-project/dunlin/cli/client"
	"github.com/dunlin-project/dunlin/internal/version"
)

// Exit codes.
const (
	exitFailed = 1
	exitUsage  = 2
)

// usageError is a wrong command line: exit code 2.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

func usagef(format string, a ...any) error { return &usageError{fmt.Errorf(format, a...)} }

// exitCode is a command's own exit code, without a message (dunlin run).
type exitCode int

func (e exitCode) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

// app is what all commands share.
type app struct {
	in         io.Reader
	out, errw  io.Writer
	kubeconfig string
	namespace  string
	configFile string
}

// Main runs the command line and returns the exit code.
func Main(args []string, in io.Reader, out, errw io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	a := &app{in: in, out: out, errw: errw}
	root := a.root()
	root.SetArgs(args)
	root.SetIn(in)
	root.SetOut(out)
	root.SetErr(errw)
	cmd, err := root.ExecuteContextC(ctx)
	var code exitCode
	var usage *usageError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &code):
		return int(code)
	case errors.As(err, &usage), isCobraUsage(err):
		_, _ = fmt.Fprintf(errw, "Error: %s\n", usageText(cmd, err))
		return exitUsage
	}
	_, _ = fmt.Fprintf(errw, "Error: %v\n", err)
	return exitFailed
}

// usageText says what is wrong with the command line, in our words where
// cobra's count arguments, and what a right one looks like.
func usageText(cmd *cobra.Command, err error) string {
	s := err.Error()
	if !isCobraUsage(err) || strings.HasPrefix(s, "unknown command") {
		return strings.TrimSpace(s)
	}
	var want, have int
	if _, serr := fmt.Sscanf(s, "requires at least %d arg(s), only received %d", &want, &have); serr == nil {
		s = "something is missing"
	} else if _, serr := fmt.Sscanf(s, "accepts %d arg(s), received %d", &want, &have); serr == nil {
		s = "something is missing"
		if have > want {
			s = "there are too many arguments"
		}
	}
	return fmt.Sprintf("%s\nUsage: %s\n(see '%s --help')", s, cmd.UseLine(), cmd.CommandPath())
}

// isCobraUsage recognises cobra's own complaints, which have no type.
func isCobraUsage(err error) bool {
	s := err.Error()
	for _, p := range []string{"unknown command", "unknown flag", "unknown shorthand", "flag needs an argument", "invalid argument \"", "accepts ", "requires at least", "required flag"} {
		if strings.HasPrefix(s, p) {
			return true
		}
	}
	return false
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "dunlin",
		Short: "Run WebAssembly modules and containers on small, far-away machines as one cluster",
		Long: `Dunlin turns small, far-away, badly connected machines into one cluster.

Start a one-node cluster and run a module on it:
  dunlin server                          # control plane and node in one process
  dunlin import hello.wasm ./hello.wasm  # give the node the module
  dunlin apply -f examples/hello/        # the Kubernetes manifests you already have
  dunlin get pods

kubectl, Helm and client-go programs work too:
  export KUBECONFIG=$(dunlin kubeconfig --path)`,
		SilenceErrors: true,
		SilenceUsage:  true,
		Version:       version.Version,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			return applyConfig(cmd, a.configFile)
		},
	}
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return usagef("%w (see '%s --help')", err, c.CommandPath())
	})
	root.PersistentFlags().StringVar(&a.kubeconfig, "kubeconfig", "", "kubeconfig to use (default: $KUBECONFIG, then this machine's server, then ~/.kube/config)")
	root.PersistentFlags().StringVar(&a.configFile, "config", defaultConfigFile(), "configuration file; every flag is a key, and a DUNLIN_ variable")
	root.AddGroup(&cobra.Group{ID: "cluster", Title: "Run a cluster:"}, &cobra.Group{ID: "work", Title: "Work with a cluster:"}, &cobra.Group{ID: "machine", Title: "This machine:"})
	add := func(group string, cmds ...*cobra.Command) {
		for _, c := range cmds {
			c.GroupID = group
			root.AddCommand(c)
		}
	}
	add("cluster", a.serverCmd(), a.agentCmd(), a.tokenCmd(), a.nodeCmd(), a.kubeconfigCmd())
	add("work", a.getCmd(), a.describeCmd(), a.applyCmd(), a.deleteCmd(), a.logsCmd(), a.scaleCmd(), a.rolloutCmd(), a.eventsCmd())
	add("machine", a.runCmd(), a.importCmd(), a.preflightCmd(), a.installCmd(), a.uninstallCmd(), a.versionCmd())
	return root
}

// client makes the API client of a command that works with a cluster.
func (a *app) client() (*client.Client, error) {
	c, err := client.New(a.kubeconfig, version.Version)
	if err != nil {
		return nil, err
	}
	c.Warn = func(s string) { _, _ = fmt.Fprintf(a.errw, "Warning: %s\n", s) }
	if a.namespace != "" {
		c.Namespace = a.namespace
	}
	return c, nil
}

// namespaced adds -n to a command.
func (a *app) namespaced(c *cobra.Command) *cobra.Command {
	c.Flags().StringVarP(&a.namespace, "namespace", "n", "", "namespace (default: the kubeconfig's)")
	return c
}

func (a *app) printf(format string, args ...any) { _, _ = fmt.Fprintf(a.out, format, args...) }
func (a *app) notef(format string, args ...any)  { _, _ = fmt.Fprintf(a.errw, format, args...) }
