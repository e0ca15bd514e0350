package cli

import (
	"context"
	"net/http"
	"net/url"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/cli/client"
)

func (a *app) eventsCmd() *cobra.Command {
	var all bool
	var forObject string
	c := &cobra.Command{
		Use:   "events",
		Short: "List what happened lately",
		Example: `  dunlin events -A
  dunlin events --for pod/hello-5d9c`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.events(cmd.Context(), all, forObject) },
	}
	c.Flags().BoolVarP(&all, "all-namespaces", "A", false, "of all namespaces")
	c.Flags().StringVar(&forObject, "for", "", "only about this object: TYPE/NAME")
	return a.namespaced(c)
}

func (a *app) events(ctx context.Context, all bool, forObject string) error {
	o := getOptions{allNamespaces: all}
	if forObject != "" {
		_, t, err := a.oneTarget(ctx, []string{forObject})
		if err != nil {
			return err
		}
		o.fieldSelector = "involvedObject.kind=" + t.res.GVK.Kind + ",involvedObject.name=" + t.names[0]
	}
	return a.get(ctx, []string{"events"}, o)
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
	var tab metav1.Table
	err := c.JSON(ctx, client.Request{Method: http.MethodGet, Path: p, Query: q, Accept: client.Table}, &tab)
	return &tab, err
}
