package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/dunlin-project/dunlin/cli/client"
)

type getOptions struct {
	output        string
	selector      string
	fieldSelector string
	allNamespaces bool
	watch         bool
	noHeaders     bool
}

func (a *app) getCmd() *cobra.Command {
	var o getOptions
	c := &cobra.Command{
		Use:   "get TYPE[,TYPE...] [NAME...]  |  get TYPE/NAME...",
		Short: "List objects as a table, or print them as YAML or JSON",
		Example: `  dunlin get pods
  dunlin get deploy,rs -A -o wide
  dunlin get pod hello-5d9c -o yaml
  dunlin get pods -l app=hello -w`,
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: a.completeObjects,
		RunE:              func(cmd *cobra.Command, args []string) error { return a.get(cmd.Context(), args, o) },
	}
	c.Flags().StringVarP(&o.output, "output", "o", "", "wide, yaml, json or name")
	c.Flags().StringVarP(&o.selector, "selector", "l", "", "label selector, such as app=hello,tier!=db")
	c.Flags().StringVar(&o.fieldSelector, "field-selector", "", "field selector, such as spec.nodeName=pi-3")
	c.Flags().BoolVarP(&o.allNamespaces, "all-namespaces", "A", false, "of all namespaces")
	c.Flags().BoolVarP(&o.watch, "watch", "w", false, "go on printing changes")
	c.Flags().BoolVar(&o.noHeaders, "no-headers", false, "leave out the table's header")
	return a.namespaced(c)
}

// target is one resource type and the names asked of it.
type target struct {
	res   client.Resource
	names []string
}

// targets resolves "TYPE[,TYPE] NAME..." and "TYPE/NAME ...".
func targets(all []client.Resource, args []string) ([]target, error) {
	if !strings.Contains(args[0], "/") {
		rs, err := client.Find(all, args[0])
		if err != nil {
			return nil, err
		}
		var out []target
		for _, r := range rs {
			out = append(out, target{r, args[1:]})
		}
		return out, nil
	}
	var out []target
	for _, arg := range args {
		typ, name, ok := strings.Cut(arg, "/")
		if !ok || name == "" {
			return nil, usagef("%q: with TYPE/NAME every argument must have that form", arg)
		}
		rs, err := client.Find(all, typ)
		if err != nil {
			return nil, err
		}
		out = append(out, target{rs[0], []string{name}})
	}
	return out, nil
}

func (a *app) get(ctx context.Context, args []string, o getOptions) error {
	switch o.output {
	case "", "wide", "yaml", "json", "name":
	default:
		return usagef("output format %q: wide, yaml, json and name are known", o.output)
	}
	c, err := a.client()
	if err != nil {
		return err
	}
	all, err := c.Resources(ctx)
	if err != nil {
		return err
	}
	ts, err := targets(all, args)
	if err != nil {
		return err
	}
	if o.watch && len(ts) > 1 {
		return usagef("only one resource type can be watched at a time")
	}
	if o.output == "" || o.output == "wide" {
		return a.getTables(ctx, c, ts, o)
	}
	return a.getObjects(ctx, c, ts, o)
}

func (o getOptions) namespace(c *client.Client) string {
	if o.allNamespaces {
		return ""
	}
	return c.Namespace
}

func (o getOptions) query() url.Values {
	q := url.Values{}
	if o.selector != "" {
		q.Set("labelSelector", o.selector)
	}
	if o.fieldSelector != "" {
		q.Set("fieldSelector", o.fieldSelector)
	}
	return q
}

func (a *app) getTables(ctx context.Context, c *client.Client, ts []target, o getOptions) error {
	printed := 0
	for _, t := range ts {
		w := &tableWriter{out: a.out, wide: o.output == "wide", noHeader: o.noHeaders, withNS: o.allNamespaces && t.res.Namespaced}
		if len(ts) > 1 {
			w.prefix = t.res.String() + "/"
		}
		paths := []string{t.res.Path(o.namespace(c), "")}
		if len(t.names) > 0 {
			paths = paths[:0]
			for _, n := range t.names {
				paths = append(paths, t.res.Path(c.Namespace, n))
			}
		}
		var tab metav1.Table
		for i, p := range paths {
			var one metav1.Table
			if err := c.JSON(ctx, client.Request{Method: http.MethodGet, Path: p, Query: o.query(), Accept: client.Table}, &one); err != nil {
				return err
			}
			if i == 0 {
				tab = one
			} else {
				tab.Rows = append(tab.Rows, one.Rows...)
			}
		}
		if len(tab.Rows) == 0 && !o.watch {
			continue
		}
		if printed > 0 {
			a.printf("\n")
		}
		printed += len(tab.Rows)
		if len(tab.Rows) > 0 {
			if err := w.print(&tab); err != nil {
				return err
			}
		}
		if o.watch {
			return a.watchTable(ctx, c, t, o, w, tab.ResourceVersion)
		}
	}
	if printed == 0 {
		where := fmt.Sprintf(" in namespace %s", c.Namespace)
		if o.allNamespaces || !ts[0].res.Namespaced {
			where = ""
		}
		a.notef("No resources found%s.\n", where)
	}
	return nil
}

func (a *app) watchTable(ctx context.Context, c *client.Client, t target, o getOptions, w *tableWriter, rv string) error {
	q := o.query()
	path := t.res.Path(o.namespace(c), "")
	if len(t.names) == 1 {
		q.Set("fieldSelector", "metadata.name="+t.names[0])
		path = t.res.Path(c.Namespace, "")
	} else if len(t.names) > 1 {
		return usagef("one name, or none, can be watched")
	}
	q.Set("resourceVersion", rv)
	err := c.Watch(ctx, path, q, client.Table, func(typ string, raw json.RawMessage) (bool, error) {
		if typ == "BOOKMARK" {
			return true, nil
		}
		var tab metav1.Table
		if err := json.Unmarshal(raw, &tab); err != nil {
			return false, fmt.Errorf("read watch event: %w", err)
		}
		return true, w.print(&tab)
	})
	if errors.Is(err, io.EOF) || errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

func (a *app) getObjects(ctx context.Context, c *client.Client, ts []target, o getOptions) error {
	var items []unstructured.Unstructured
	single := false
	for _, t := range ts {
		for _, n := range t.names {
			u, err := c.Object(ctx, t.res.Path(c.Namespace, n))
			if err != nil {
				return err
			}
			items = append(items, *u)
			single = len(ts) == 1 && len(t.names) == 1
		}
		if len(t.names) > 0 {
			continue
		}
		var l struct {
			Items []map[string]any `json:"items"`
		}
		if err := c.JSON(ctx, client.Request{Method: http.MethodGet, Path: t.res.Path(o.namespace(c), ""), Query: o.query()}, &l); err != nil {
			return err
		}
		for _, m := range l.Items {
			m["apiVersion"], m["kind"] = t.res.GVK.GroupVersion().String(), t.res.GVK.Kind
			items = append(items, unstructured.Unstructured{Object: m})
		}
	}
	if o.output == "name" {
		for i := range items {
			a.printf("%s/%s\n", nameOf(ts, &items[i]), items[i].GetName())
		}
		return nil
	}
	var v any
	if single {
		v = items[0].Object
	} else {
		list := make([]any, len(items))
		for i := range items {
			list[i] = items[i].Object
		}
		v = map[string]any{"apiVersion": "v1", "kind": "List", "items": list}
	}
	return a.marshal(v, o.output)
}

func nameOf(ts []target, u *unstructured.Unstructured) string {
	for _, t := range ts {
		if t.res.GVK == u.GroupVersionKind() {
			return t.res.String()
		}
	}
	return strings.ToLower(u.GetKind())
}

func (a *app) marshal(v any, format string) error {
	b, err := json.MarshalIndent(v, "", "    ")
	if err == nil && format == "yaml" {
		b, err = yaml.JSONToYAML(b)
	}
	if err != nil {
		return fmt.Errorf("print: %w", err)
	}
	a.printf("%s\n", strings.TrimSuffix(string(b), "\n"))
	return nil
}
