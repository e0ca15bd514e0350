package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/cli/client"
)

func (a *app) eventsCmd() *cobra.Command {
	var all bool
	var forObject string
	c := &cobra.Command{
		Use:   "events",
		Short: "List what happened lately, the latest last",
		Example: `  dunlin events -A
  dunlin events --for pod/hello-5d9c
  dunlin events --local                  # those that no server has been told yet`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.events(cmd.Context(), all, forObject) },
	}
	c.Flags().BoolVarP(&all, "all-namespaces", "A", false, "of all namespaces")
	c.Flags().StringVar(&forObject, "for", "", "only about this object: TYPE/NAME")
	return a.viewing(c)
}

func (a *app) events(ctx context.Context, all bool, forObject string) error {
	o := getOptions{allNamespaces: all, byTime: true}
	if forObject != "" {
		_, t, err := a.oneTarget(ctx, []string{forObject})
		if err != nil {
			return err
		}
		o.fieldSelector = "involvedObject.kind=" + t.res.GVK.Kind + ",involvedObject.name=" + t.names[0]
	}
	return a.get(ctx, []string{"events"}, o)
}

// sortEvents puts the latest last, as kubectl events does.
func sortEvents(tab *metav1.Table) error {
	at := make(map[string]time.Time, len(tab.Rows)) // by the row's object
	for i := range tab.Rows {
		raw := tab.Rows[i].Object.Raw
		var e corev1.Event
		if err := json.Unmarshal(raw, &e); err != nil {
			return fmt.Errorf("read event: %w", err)
		}
		at[string(raw)] = lastSeen(&e)
	}
	slices.SortStableFunc(tab.Rows, func(a, b metav1.TableRow) int {
		return at[string(a.Object.Raw)].Compare(at[string(b.Object.Raw)])
	})
	return nil
}

// lastSeen is when an event happened last.
func lastSeen(e *corev1.Event) time.Time {
	switch {
	case e.Series != nil:
		return e.Series.LastObservedTime.Time
	case !e.LastTimestamp.IsZero():
		return e.LastTimestamp.Time
	case !e.EventTime.IsZero():
		return e.EventTime.Time
	case !e.FirstTimestamp.IsZero():
		return e.FirstTimestamp.Time
	}
	return e.CreationTimestamp.Time
}

// eventsFor gets the events about one object as table rows.
func eventsFor(ctx context.Context, c *client.Client, namespace, kind, name, uid string) (*metav1.Table, error) {
	q := url.Values{}
	sel := "involvedObject.kind=" + kind + ",involvedObject.name=" + name
	if uid != "" {
		sel += ",involvedObject.uid=" + uid
	}
	q.Set("fieldSelector", sel)
	p := "/api/v1/events"
	if namespace != "" {
		p = "/api/v1/namespaces/" + url.PathEscape(namespace) + "/events"
	}
	r := client.Resource{GVK: schema.GroupVersionKind{Version: "v1", Kind: "Event"}, Name: "events"}
	return table(ctx, c, r, p, q, false)
}
