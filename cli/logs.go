package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/dunlin-project/dunlin/cli/client"
)

type logsOptions struct {
	container  string
	follow     bool
	previous   bool
	timestamps bool
	tail       int64
	since      time.Duration
}

func (a *app) logsCmd() *cobra.Command {
	var o logsOptions
	c := &cobra.Command{
		Use:   "logs (POD | TYPE/NAME)",
		Short: "Print what a container wrote",
		Long: `Print what a container wrote.

With --local the agent of this machine is asked instead of a server: for the
logs of its own pods, also while no server can be reached.`,
		Example: `  dunlin logs hello-5d9c
  dunlin logs deploy/hello -f --tail=20
  dunlin logs crasher --previous
  dunlin logs hello-5d9c --local`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completePods,
		RunE: func(cmd *cobra.Command, args []string) error {
			if o.tail < -1 {
				return usagef("--tail=%d: must not be negative; -1 is all lines", o.tail)
			}
			if o.since < 0 {
				return usagef("--since=%s: must not be negative", o.since)
			}
			return a.logs(cmd.Context(), args[0], o)
		},
	}
	c.Flags().StringVarP(&o.container, "container", "c", "", "container (default: the first)")
	c.Flags().BoolVarP(&o.follow, "follow", "f", false, "go on printing what is written")
	c.Flags().BoolVarP(&o.previous, "previous", "p", false, "of the attempt before the last restart")
	c.Flags().BoolVar(&o.timestamps, "timestamps", false, "with the time of each line")
	c.Flags().Int64Var(&o.tail, "tail", -1, "only the last lines")
	c.Flags().DurationVar(&o.since, "since", 0, "only what is newer than this, such as 5m")
	return a.viewing(c)
}

func (a *app) logs(ctx context.Context, what string, o logsOptions) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	pod := what
	if strings.Contains(what, "/") {
		if pod, err = a.podOf(ctx, c, what); err != nil {
			return err
		}
	}
	q := url.Values{}
	set := func(k, v string, ok bool) {
		if ok {
			q.Set(k, v)
		}
	}
	set("container", o.container, o.container != "")
	set("follow", "true", o.follow)
	set("previous", "true", o.previous)
	set("timestamps", "true", o.timestamps)
	set("tailLines", strconv.FormatInt(o.tail, 10), o.tail >= 0)
	set("sinceSeconds", strconv.FormatInt(int64(max(1, o.since.Seconds())), 10), o.since > 0)
	body, err := c.Do(ctx, client.Request{Method: http.MethodGet, Path: podPath(c.Namespace, pod) + "/log", Query: q, Accept: "*/*"})
	if err != nil {
		return err
	}
	defer func() { _ = body.Close() }()
	if _, err := io.Copy(a.out, body); err != nil && !errors.Is(err, context.Canceled) {
		return fmt.Errorf("read log: %w", err)
	}
	return nil
}

func podPath(namespace, name string) string {
	p := "/api/v1/pods"
	if namespace != "" {
		p = "/api/v1/namespaces/" + url.PathEscape(namespace) + "/pods"
	}
	if name != "" {
		p += "/" + url.PathEscape(name)
	}
	return p
}

// podOf picks a pod of a workload: the first ready one.
func (a *app) podOf(ctx context.Context, c *client.Client, what string) (string, error) {
	ts, err := a.targets(ctx, c, []string{what})
	if err != nil {
		return "", err
	}
	if ts[0].res.GVK.Kind == "Pod" {
		return ts[0].names[0], nil
	}
	if c.Local() {
		return "", usagef("%s: an agent keeps logs of pods only", what)
	}
	u, err := c.Object(ctx, ts[0].res.Path(c.Namespace, ts[0].names[0]))
	if err != nil {
		return "", err
	}
	sel, ok, _ := unstructured.NestedStringMap(u.Object, "spec", "selector", "matchLabels")
	if !ok {
		sel, ok, _ = unstructured.NestedStringMap(u.Object, "spec", "selector")
	}
	if !ok {
		return "", fmt.Errorf("%s has no selector by which its pods could be found", what)
	}
	var terms []string
	for k, v := range sel {
		terms = append(terms, k+"="+v)
	}
	var l struct {
		Items []map[string]any `json:"items"`
	}
	q := url.Values{"labelSelector": {strings.Join(terms, ",")}}
	if err := c.JSON(ctx, client.Request{Method: http.MethodGet, Path: podPath(c.Namespace, ""), Query: q}, &l); err != nil {
		return "", err
	}
	if len(l.Items) == 0 {
		return "", fmt.Errorf("%s has no pods", what)
	}
	best := &unstructured.Unstructured{Object: l.Items[0]}
	for _, m := range l.Items {
		if p := (&unstructured.Unstructured{Object: m}); conditionStatus(p, "Ready") == "True" {
			best = p
			break
		}
	}
	if len(l.Items) > 1 {
		a.notef("Found %d pods, using pod/%s\n", len(l.Items), best.GetName())
	}
	return best.GetName(), nil
}

func conditionStatus(u *unstructured.Unstructured, typ string) string {
	c := condition(u, typ)
	s, _ := c["status"].(string)
	return s
}

func condition(u *unstructured.Unstructured, typ string) map[string]any {
	conds, _, _ := unstructured.NestedSlice(u.Object, "status", "conditions")
	for _, c := range conds {
		if m, ok := c.(map[string]any); ok && m["type"] == typ {
			return m
		}
	}
	return nil
}
