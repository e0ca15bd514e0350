package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/dunlin-project/dunlin/cli/client"
	"github.com/dunlin-project/dunlin/controlplane/api/printers"
	"github.com/dunlin-project/dunlin/node/view"
)

// viewing adds to a command what lets it ask the agent of this machine.
func (a *app) viewing(c *cobra.Command) *cobra.Command {
	c.Flags().BoolVar(&a.local, "local", false, "ask the agent of this machine instead of a server: what it knows, in all namespaces unless -n is given")
	c.Flags().StringVar(&a.runDir, "run-dir", defaultDirs().run, "with --local, run-time folder of the agent")
	run := c.RunE
	c.RunE = func(cmd *cobra.Command, args []string) error {
		return a.orLocal(cmd, args, run(cmd, args))
	}
	return a.namespaced(c)
}

// orLocal adds to the error of a command that reached no server that an agent
// runs here, which could be asked instead.
func (a *app) orLocal(cmd *cobra.Command, args []string, err error) error {
	var unreachable *client.UnreachableError
	if a.local || !errors.As(err, &unreachable) && !errors.Is(err, client.ErrNoKubeconfig) {
		return err
	}
	if _, serr := os.Stat(agentSocket(a.runDir)); serr != nil {
		return err
	}
	say := strings.TrimSpace(cmd.CommandPath()+" "+strings.Join(args, " ")) + " --local"
	if !locally(cmd.Name(), args) {
		say = cmd.CommandPath() + " pods --local" // of what was asked for, an agent knows nothing
	}
	if cmd.Flags().Changed("run-dir") {
		say += " --run-dir " + a.runDir
	}
	return fmt.Errorf("%w\nAn agent runs on this machine, and knows its own pods without any server: %s", err, say)
}

// locally says whether an agent can answer the command, too.
func locally(name string, args []string) bool {
	if name == "logs" || name == "events" {
		return true
	}
	if len(args) == 0 {
		return false
	}
	typ, _, _ := strings.Cut(args[0], "/")
	_, err := client.Find(client.LocalResources(), typ)
	return err == nil
}

// targets resolves what a command is about.
func (a *app) targets(ctx context.Context, c *client.Client, args []string) ([]target, error) {
	all, err := c.Resources(ctx)
	if err != nil {
		return nil, err
	}
	ts, err := targets(all, args)
	var unknown *client.UnknownTypeError
	if c.Local() && errors.As(err, &unknown) {
		return nil, fmt.Errorf("with --local there are pods, this node (nodes) and events that were not reported yet, but no %q: everything else only a server knows", unknown.Typed)
	}
	return ts, err
}

// everywhere says whether objects of all namespaces are meant.
func (o getOptions) everywhere(c *client.Client) bool {
	return o.allNamespaces || c.Local() && c.Namespace == ""
}

// table gets a table: the server's, or one made here, with the server's
// columns, of what the agent knows.
func table(ctx context.Context, c *client.Client, r client.Resource, path string, q url.Values, one bool) (*metav1.Table, error) {
	out := &metav1.Table{}
	if !c.Local() {
		err := c.JSON(ctx, client.Request{Method: http.MethodGet, Path: path, Query: q, Accept: client.Table}, out)
		return out, err
	}
	obj := map[string][2]runtime.Object{
		"Pod": {&corev1.PodList{}, &corev1.Pod{}}, "Node": {&corev1.NodeList{}, &corev1.Node{}}, "Event": {&corev1.EventList{}, &corev1.Event{}},
	}[r.GVK.Kind][number(one)]
	if obj == nil {
		return nil, fmt.Errorf("an agent knows no %s", r.Name)
	}
	if err := c.JSON(ctx, client.Request{Method: http.MethodGet, Path: path, Query: q}, obj); err != nil {
		return nil, err
	}
	made, err := printers.Table(obj, printers.Options{Now: time.Now(), IncludeObject: metav1.IncludeObjectPolicy(q.Get("includeObject"))})
	if err != nil {
		return nil, err
	}
	// Over the wire a table's rows carry their objects as bytes.
	b, err := json.Marshal(made)
	if err == nil {
		err = json.Unmarshal(b, out)
	}
	if err != nil {
		return nil, fmt.Errorf("make table: %w", err)
	}
	return out, nil
}

func number(b bool) int {
	if b {
		return 1
	}
	return 0
}

// describeLink says how this node stands with the servers.
func (a *app) describeLink(ctx context.Context, c *client.Client) error {
	var s view.Status
	if err := c.JSON(ctx, client.Request{Method: http.MethodGet, Path: "/status"}, &s); err != nil {
		return err
	}
	a.field("Agent", "%s, up for %s", s.Version, duration.HumanDuration(s.Uptime))
	a.field("Control plane", "%s", linkText(&s))
	if next := nextOfLink(&s); next != "" {
		a.field("Next", "%s", next)
	}
	return nil
}

// nextOfLink is what to do about the connection; "" is nothing. Who is refused
// for good is told by the servers what helps.
func nextOfLink(s *view.Status) string {
	switch {
	case linked(s):
		return ""
	case strings.Contains(s.Reason, "dunlin agent reset"):
		return "the servers answer and refuse this node for good: do what they say above; waiting does not help"
	}
	return "what runs here goes on; connecting is tried again by itself, so look at the network and the servers (" + strings.Join(s.Servers, ", ") + ")"
}

// linked: it has a connection, and not only a lease that was renewed a moment
// ago over one that is gone.
func linked(s *view.Status) bool { return s.Connected && s.Server != "" }

func linkText(s *view.Status) string {
	if linked(s) {
		return "connected to " + s.Server
	}
	since := "since the agent started, " + duration.HumanDuration(s.Uptime) + " ago"
	if s.LeaseAge != nil {
		since = "for " + duration.HumanDuration(*s.LeaseAge)
	}
	if s.Reason == "" {
		return "out of reach " + since
	}
	return "out of reach " + since + ": " + s.Reason
}
