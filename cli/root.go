// Package cli holds the commands of the dunlin binary: flags, output and
// progress. Commands that talk to a cluster are thin clients of its API; the
// server prints the tables and does the merging.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

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
	configDir  string // of this machine's server: where its kubeconfig is; "" is the usual ones
	configWins bool   // it was asked for on the command line: not even $KUBECONFIG comes first
	namespace  string
	configFile string
	local      bool   // ask this machine's agent
	runDir     string // of that agent
}

// Main runs the command line and returns the exit code.
func Main(args []string, in io.Reader, out, errw io.Writer) int {
	ctx, stop := untilSignal(context.Background())
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
	if sig := interruption(0); errors.Is(err, context.Canceled) && errors.As(context.Cause(ctx), &sig) {
		return sig.exitCode()
	}
	return exitFailed
}

// usageText says what is wrong with the command line, in our words where
// cobra's count arguments, and what a right one looks like.
func usageText(cmd *cobra.Command, err error) string {
	s := err.Error()
	if !isCobraUsage(err) {
		return strings.TrimSpace(s)
	}
	if strings.HasPrefix(s, "unknown command") {
		return fmt.Sprintf("%s\n(see '%s --help')", strings.TrimSpace(s), cmd.CommandPath())
	}
	var want, most, have int
	for _, form := range []struct {
		text string
		into []any
	}{
		{"requires at least %d arg(s), only received %d", []any{&want, &have}},
		{"accepts %d arg(s), received %d", []any{&want, &have}},
		{"accepts between %d and %d arg(s), received %d", []any{&want, &most, &have}},
	} {
		if _, serr := fmt.Sscanf(s, form.text, form.into...); serr != nil {
			continue
		}
		if s = "there are too many arguments"; have < want {
			s = fmt.Sprintf("%s needs %s", cmd.CommandPath(), expected(cmd))
		}
		break
	}
	return fmt.Sprintf("%s\nUsage: %s%s\n(see '%s --help')", s, cmd.UseLine(), example(cmd), cmd.CommandPath())
}

// flagText says what is wrong with a flag's value: not with the words of
// strconv.
func flagText(err error) string {
	var bad *pflag.InvalidValueError
	if !errors.As(err, &bad) {
		return err.Error()
	}
	return fmt.Sprintf("--%s=%s: %s", bad.GetFlag().Name, bad.GetValue(), wantedText(bad.GetFlag(), errors.Unwrap(bad)))
}

// wantedText describes the values that a flag takes; err is used where its
// type says nothing.
func wantedText(f *pflag.Flag, err error) string {
	switch f.Value.Type() {
	case "int", "int32", "int64":
		return "a whole number is wanted"
	case "uint32", "uint64":
		return "a whole number from 0 on is wanted"
	case "uint16":
		return "a whole number from 0 to 65535 is wanted"
	case "bool":
		return "true or false is wanted"
	case "duration":
		return "a time such as 30s, 5m or 2h is wanted"
	case "stringToString":
		return "key=value,... is wanted"
	}
	return err.Error()
}

// expected names a command's arguments, as its usage line does.
func expected(cmd *cobra.Command) string {
	_, args, _ := strings.Cut(cmd.Use, " ")
	return args
}

// example is the first one of a command, on a line of its own.
func example(cmd *cobra.Command) string {
	first, _, _ := strings.Cut(strings.TrimSpace(cmd.Example), "\n")
	if first, _, _ = strings.Cut(first, "  #"); first == "" {
		return ""
	}
	return "\nExample: " + strings.TrimSpace(first)
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
		Short: "Run WebAssembly modules on small, far-away machines as one cluster",
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
			a.configWins = cmd.Flags().Changed("config-dir")
			return applyConfig(cmd, a.configFile)
		},
	}
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return usagef("%s (see '%s --help')", flagText(err), c.CommandPath())
	})
	root.PersistentFlags().StringVar(&a.kubeconfig, "kubeconfig", "", "kubeconfig to use (default: $KUBECONFIG, then this machine's server, then ~/.kube/config)")
	root.PersistentFlags().StringVar(&a.configDir, "config-dir", "", "configuration folder of this machine's server, where its kubeconfig is (default: the usual ones)")
	root.PersistentFlags().StringVar(&a.configFile, "config", defaultConfigFile(), "configuration file; every flag is a key, and a DUNLIN_ variable")
	root.AddGroup(&cobra.Group{ID: "cluster", Title: "Run a cluster:"}, &cobra.Group{ID: "work", Title: "Work with a cluster:"}, &cobra.Group{ID: "machine", Title: "This machine:"})
	add := func(group string, cmds ...*cobra.Command) {
		for _, c := range cmds {
			c.GroupID = group
			root.AddCommand(c)
		}
	}
	add("cluster", a.serverCmd(), a.agentCmd(), a.tokenCmd(), a.nodeCmd(), a.cordonCmd(), a.uncordonCmd(), a.drainCmd(), a.snapshotCmd(), a.netCmd(), a.kubeconfigCmd())
	add("work", a.getCmd(), a.describeCmd(), a.explainCmd(), a.applyCmd(), a.deleteCmd(), a.logsCmd(), a.execCmd(), a.attachCmd(), a.portForwardCmd(), a.cpCmd(), a.scaleCmd(), a.rolloutCmd(), a.eventsCmd(), a.topCmd(), a.apiResourcesCmd())
	add("machine", a.runCmd(), a.importCmd(), a.exportCmd(), a.imagesCmd(), a.preflightCmd(), a.installCmd(), a.uninstallCmd(), a.versionCmd())
	strictHelp(root)
	root.InitDefaultCompletionCmd()
	for _, c := range root.Commands() {
		if c.Name() == "completion" {
			c.Args = cobra.NoArgs
			c.RunE = func(c *cobra.Command, _ []string) error { return c.Help() }
		}
	}
	return root
}

// client makes the API client of a command that works with a cluster.
func (a *app) client() (*client.Client, error) {
	if a.local {
		c := client.NewLocal(agentSocket(a.runDir), version.Version)
		c.Namespace = a.namespace
		return c, nil
	}
	cfg, err := a.config()
	if err != nil {
		return nil, err
	}
	c, err := cfg.Client(version.Version)
	if err != nil {
		return nil, err
	}
	var said sync.Map // once each, however often a command asks
	c.Warn = func(s string) {
		if _, again := said.LoadOrStore(s, true); !again {
			_, _ = fmt.Fprintf(a.errw, "Warning: %s\n", s)
		}
	}
	if a.namespace != "" {
		c.Namespace = a.namespace
	}
	return c, nil
}

// strictHelp makes 'dunlin help' refuse what it knows nothing about.
func strictHelp(root *cobra.Command) {
	root.InitDefaultHelpCmd()
	for _, c := range root.Commands() {
		if c.Name() != "help" {
			continue
		}
		c.Run, c.RunE = nil, func(_ *cobra.Command, args []string) error {
			about, left, err := root.Find(args)
			if err != nil || len(left) > 0 {
				return usagef("unknown help topic %q ('dunlin --help' lists the commands)", strings.Join(args, " "))
			}
			about.InitDefaultHelpFlag()
			return about.Help()
		}
	}
}

// config is the kubeconfig of --kubeconfig, of --config-dir, or of the usual
// places.
func (a *app) config() (*client.Config, error) {
	if a.kubeconfig == "" && a.configWins {
		return client.Load(filepath.Join(a.configDir, client.AdminFile), "")
	}
	return client.Load(a.kubeconfig, a.configDir)
}

// namespaced adds -n to a command.
func (a *app) namespaced(c *cobra.Command) *cobra.Command {
	c.Flags().StringVarP(&a.namespace, "namespace", "n", "", "namespace (default: the kubeconfig's)")
	return c
}

func (a *app) printf(format string, args ...any) { _, _ = fmt.Fprintf(a.out, format, args...) }
func (a *app) notef(format string, args ...any)  { _, _ = fmt.Fprintf(a.errw, format, args...) }
