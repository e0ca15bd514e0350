package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/dunlin-project/dunlin/cli/client"
)

type deleteOptions struct {
	files     []string
	selector  string
	all       bool
	force     bool
	grace     int64
	cascade   string
	wait      bool
	timeout   time.Duration
	ignoreNot bool
}

func (a *app) deleteCmd() *cobra.Command {
	var o deleteOptions
	c := &cobra.Command{
		Use:   "delete (TYPE NAME... | TYPE/NAME... | TYPE -l SELECTOR | TYPE --all | -f FILE...)",
		Short: "Delete objects, and wait until they are gone",
		Example: `  dunlin delete deploy hello
  dunlin delete -f examples/hello/
  dunlin delete pods -l app=hello
  dunlin delete pod stuck --force      # does not wait for the node to say it stopped`,
		ValidArgsFunction: a.completeObjects,
		RunE:              func(cmd *cobra.Command, args []string) error { return a.delete(cmd.Context(), args, o) },
	}
	c.Flags().StringArrayVarP(&o.files, "filename", "f", nil, "file, folder or - that names the objects")
	c.Flags().StringVarP(&o.selector, "selector", "l", "", "delete those with these labels")
	c.Flags().BoolVar(&o.all, "all", false, "delete all of the type in the namespace")
	c.Flags().BoolVar(&o.force, "force", false, "remove pods at once, without waiting for their node")
	c.Flags().Int64Var(&o.grace, "grace-period", -1, "seconds that pods get to stop (-1: their own)")
	c.Flags().StringVar(&o.cascade, "cascade", "background", "what happens to dependents: background, foreground or orphan")
	c.Flags().BoolVar(&o.wait, "wait", true, "wait until the objects are gone")
	c.Flags().DurationVar(&o.timeout, "timeout", 0, "how long to wait (0: without end)")
	c.Flags().BoolVar(&o.ignoreNot, "ignore-not-found", false, "a missing object is no error")
	return a.namespaced(c)
}

// doomed is one object to delete.
type doomed struct {
	label, path string
}

func (a *app) delete(ctx context.Context, args []string, o deleteOptions) error {
	if len(args) == 0 && len(o.files) == 0 {
		return usagef("name what to delete: TYPE NAME, TYPE/NAME, TYPE -l SELECTOR or -f FILE; example: dunlin delete pod hello-5d9c")
	}
	body, err := o.body()
	if err != nil {
		return err
	}
	c, err := a.client()
	if err != nil {
		return err
	}
	all, err := c.Resources(ctx)
	if err != nil {
		return err
	}
	list, err := a.doomed(ctx, c, all, args, o)
	if err != nil {
		return err
	}
	if o.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, o.timeout)
		defer cancel()
	}
	if o.force {
		a.notef("Warning: removed at once; if the node is out of reach the pod may still be running there.\n")
	}
	type left struct {
		doomed
		uid string
	}
	var waiting []left
	each := a.each("deleted", len(list))
	for i, d := range list {
		var reply struct {
			Kind     string            `json:"kind"`
			Metadata metav1.ObjectMeta `json:"metadata"`
			Details  struct {
				UID string `json:"uid"`
			} `json:"details"`
		}
		err := c.JSON(ctx, client.Request{Method: http.MethodDelete, Path: d.path, Body: body, ContentType: client.JSON}, &reply)
		if client.IsNotFound(err) && o.ignoreNot {
			continue
		}
		if err != nil {
			if len(list) > 1 {
				err = fmt.Errorf("%s: %w", d.label, err)
			}
			if err := each.note(ctx, i, err); err != nil {
				return err
			}
			continue
		}
		uid := reply.Details.UID
		if reply.Kind != "Status" {
			uid = string(reply.Metadata.UID)
		}
		a.printf("%s deleted\n", d.label)
		waiting = append(waiting, left{d, uid})
	}
	for _, w := range waiting {
		if !o.wait {
			break
		}
		if err := waitGone(ctx, c, w.path, w.uid); err != nil {
			return fmt.Errorf("%s: %w", w.label, err)
		}
	}
	return each.done()
}

func (o deleteOptions) body() ([]byte, error) {
	m := map[string]any{"kind": "DeleteOptions", "apiVersion": "v1"}
	switch strings.ToLower(o.cascade) {
	case "background", "true":
		m["propagationPolicy"] = "Background"
	case "foreground":
		m["propagationPolicy"] = "Foreground"
	case "orphan", "false":
		m["propagationPolicy"] = "Orphan"
	default:
		return nil, usagef("--cascade=%s: background, foreground and orphan are known", o.cascade)
	}
	if o.force {
		o.grace = 0
	}
	if o.grace >= 0 {
		m["gracePeriodSeconds"] = o.grace
	}
	return json.Marshal(m)
}

func (a *app) doomed(ctx context.Context, c *client.Client, all []client.Resource, args []string, o deleteOptions) ([]doomed, error) {
	var list []doomed
	if len(o.files) > 0 {
		if len(args) > 0 {
			return nil, usagef("give either files or names, not both")
		}
		docs, err := a.readManifests(o.files)
		if err != nil {
			return nil, err
		}
		for i := len(docs) - 1; i >= 0; i-- { // what was applied last goes first
			d := docs[i]
			r, err := client.ByKind(all, d.gvk)
			if err != nil {
				return nil, err
			}
			list = append(list, doomed{r.String() + "/" + d.name, r.Path(d.namespaceOr(c.Namespace), d.name)})
		}
		return list, nil
	}
	ts, err := targets(all, args)
	if err != nil {
		return nil, err
	}
	for _, t := range ts {
		for _, n := range t.names {
			list = append(list, doomed{t.res.String() + "/" + n, t.res.Path(c.Namespace, n)})
		}
		if len(t.names) > 0 {
			continue
		}
		if o.selector == "" && !o.all {
			return nil, usagef("give a name, a selector (-l) or --all")
		}
		q := url.Values{}
		if o.selector != "" {
			q.Set("labelSelector", o.selector)
		}
		var l metav1.PartialObjectMetadataList
		if err := c.JSON(ctx, client.Request{Method: http.MethodGet, Path: t.res.Path(c.Namespace, ""), Query: q}, &l); err != nil {
			return nil, err
		}
		for _, i := range l.Items {
			list = append(list, doomed{t.res.String() + "/" + i.Name, t.res.Path(i.Namespace, i.Name)})
		}
	}
	return list, nil
}

// waitGone polls until the object, with that uid, no longer exists.
func waitGone(ctx context.Context, c *client.Client, path, uid string) error {
	t := time.NewTicker(200 * time.Millisecond)
	defer t.Stop()
	var last *unstructured.Unstructured // the end may come while one is asked for
	for {
		u, err := c.Object(ctx, path)
		if err == nil {
			last = u
		}
		if client.IsNotFound(err) || (err == nil && uid != "" && string(u.GetUID()) != uid) {
			return nil
		}
		if err != nil && ctx.Err() == nil {
			return err
		}
		select {
		case <-ctx.Done():
			if last == nil {
				return fmt.Errorf("still there when waiting ended: %w", ctx.Err())
			}
			return fmt.Errorf("deleted, but still there when waiting ended: it waits for %s", waitsFor(last))
		case <-t.C:
		}
	}
}
