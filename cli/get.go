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
	"k8s.io/client-go/util/jsonpath"
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
	raw           string
	showLabels    bool
	sortBy        string

	order    *order             // of sortBy
	byTime   bool               // Events, the latest last
	template *jsonpath.JSONPath // of output
}

// table says whether a table is asked for.
func (o getOptions) table() bool { return o.output == "" || o.output == "wide" }

func (a *app) getCmd() *cobra.Command {
	var o getOptions
	c := &cobra.Command{
		Use:   "get TYPE[,TYPE...] [NAME...]  |  get TYPE/NAME...",
		Short: "List objects as a table, or print them as YAML or JSON",
		Long: `List objects as a table, or print them as YAML or JSON.

With --local the agent of this machine is asked instead of a server: for its
pods, its node, and the events it could not report yet. It answers from its own
memory, so this works on a site that is cut off. Only root, and the user that
the agent runs as, may ask it.`,
		Example: `  dunlin get pods
  dunlin get deploy,rs -A -o wide
  dunlin get pod hello-5d9c -o yaml
  dunlin get pods -l app=hello -w
  dunlin get pods --sort-by=.metadata.creationTimestamp --show-labels
  dunlin get pods -o jsonpath='{range .items[*]}{.metadata.name} {.status.podIP}{"\n"}{end}'
  dunlin get pods --local                            # what this node runs, without any server
  dunlin get --raw /api/v1/nodes/pi-3/proxy/metrics  # a node's figures, through the server
  dunlin get --raw /metrics --local`,
		Args: func(cmd *cobra.Command, args []string) error {
			if o.raw != "" {
				return cobra.NoArgs(cmd, args)
			}
			return cobra.MinimumNArgs(1)(cmd, args)
		},
		ValidArgsFunction: a.completeObjects,
		RunE: func(cmd *cobra.Command, args []string) error {
			if o.raw != "" {
				return a.getRaw(cmd.Context(), o.raw)
			}
			return a.get(cmd.Context(), args, o)
		},
	}
	c.Flags().StringVarP(&o.output, "output", "o", "", "wide, yaml, json, name or jsonpath=TEMPLATE")
	c.Flags().StringVarP(&o.selector, "selector", "l", "", "label selector, such as app=hello,tier!=db")
	c.Flags().StringVar(&o.fieldSelector, "field-selector", "", "field selector, such as spec.nodeName=pi-3")
	c.Flags().BoolVarP(&o.allNamespaces, "all-namespaces", "A", false, "of all namespaces")
	c.Flags().BoolVarP(&o.watch, "watch", "w", false, "go on printing changes")
	c.Flags().BoolVar(&o.noHeaders, "no-headers", false, "leave out the table's header")
	c.Flags().BoolVar(&o.showLabels, "show-labels", false, "add the labels as the table's last column")
	c.Flags().StringVar(&o.sortBy, "sort-by", "", "sort by this field, such as .metadata.creationTimestamp")
	c.Flags().StringVar(&o.raw, "raw", "", "print the answer to GET of this path as it is")
	return a.viewing(c)
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

// parse checks the options that need it, before anything is asked.
func (o *getOptions) parse() (err error) {
	if t, ok := strings.CutPrefix(o.output, "jsonpath="); ok {
		o.template, err = template(t)
		return errors.Join(err, o.parseOrder())
	}
	switch o.output {
	case "", "wide", "yaml", "json", "name":
		return o.parseOrder()
	}
	return usagef("output format %q: wide, yaml, json and name are known, and jsonpath=TEMPLATE", o.output)
}

func (o *getOptions) parseOrder() (err error) {
	if o.order, err = orderBy(o.sortBy); err != nil {
		return err
	}
	if o.showLabels && !o.table() {
		return usagef("--show-labels is for tables; -o %s shows the labels anyway or has no place for them", o.output)
	}
	return nil
}

func (a *app) get(ctx context.Context, args []string, o getOptions) error {
	if err := o.parse(); err != nil {
		return err
	}
	c, err := a.client()
	if err != nil {
		return err
	}
	if o.watch && c.Local() {
		return usagef("--watch needs a server; with --local, ask again ('watch dunlin get pods --local')")
	}
	ts, err := a.targets(ctx, c, args)
	if err != nil {
		return err
	}
	if o.watch && len(ts) > 1 {
		return usagef("only one resource type can be watched at a time")
	}
	if o.table() {
		return a.getTables(ctx, c, ts, o)
	}
	return a.getObjects(ctx, c, ts, o)
}

// getRaw prints what a path answers.
func (a *app) getRaw(ctx context.Context, path string) error {
	u, err := url.Parse(path)
	if err != nil || !strings.HasPrefix(u.Path, "/") || u.Host != "" {
		return usagef("--raw=%s: a path such as /readyz is wanted", path)
	}
	c, err := a.client()
	if err != nil {
		return err
	}
	body, err := c.Do(ctx, client.Request{Method: http.MethodGet, Path: u.EscapedPath(), Query: u.Query(), Accept: "*/*"})
	if err != nil {
		return err
	}
	defer func() { _ = body.Close() }()
	if _, err := io.Copy(a.out, body); err != nil {
		return fmt.Errorf("read the answer: %w", err)
	}
	return nil
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
	if (o.order != nil || o.byTime) && o.table() {
		q.Set("includeObject", "Object") // what to sort by may be anywhere
	}
	return q
}

// missed collects the named objects that there are not, so that the others
// are printed all the same.
type missed []error

// note keeps a miss and returns any other error.
func (m *missed) note(err error) error {
	if !client.IsNotFound(err) {
		return err
	}
	*m = append(*m, err)
	return nil
}

// end reports all of them.
func (m missed) end(a *app) error {
	for i, err := range m {
		if i == len(m)-1 {
			return err
		}
		a.notef("Error: %v\n", err)
	}
	return nil
}

func (a *app) getTables(ctx context.Context, c *client.Client, ts []target, o getOptions) error {
	printed := 0
	var misses missed
	for _, t := range ts {
		w := &tableWriter{out: a.out, wide: o.output == "wide", noHeader: o.noHeaders, withNS: o.everywhere(c) && t.res.Namespaced, labels: o.showLabels}
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
		for _, p := range paths {
			one, err := table(ctx, c, t.res, p, o.query(), len(t.names) > 0)
			if err != nil {
				if len(t.names) == 0 || o.watch {
					return err
				}
				if err := misses.note(err); err != nil {
					return err
				}
				continue
			}
			if len(tab.ColumnDefinitions) == 0 {
				tab = *one
			} else {
				tab.Rows = append(tab.Rows, one.Rows...)
			}
		}
		if len(tab.Rows) == 0 && !o.watch {
			continue
		}
		if err := o.sortRows(&tab); err != nil {
			return err
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
	if printed == 0 && len(misses) == 0 {
		where := fmt.Sprintf(" in namespace %s", c.Namespace)
		if o.everywhere(c) || !ts[0].res.Namespaced {
			where = ""
		}
		a.notef("No resources found%s.\n", where)
	}
	return misses.end(a)
}

// sortRows orders a table as --sort-by says.
func (o getOptions) sortRows(tab *metav1.Table) error {
	if o.byTime {
		return sortEvents(tab)
	}
	if o.order == nil {
		return nil
	}
	objects := make([]any, len(tab.Rows))
	for i := range tab.Rows {
		objects[i] = tab.Rows[i].Object.Raw
	}
	index, err := o.order.sorted(objects)
	if err != nil {
		return err
	}
	rows := make([]metav1.TableRow, len(index))
	for to, from := range index {
		rows[to] = tab.Rows[from]
	}
	tab.Rows = rows
	return nil
}

func (a *app) watchTable(ctx context.Context, c *client.Client, t target, o getOptions, w *tableWriter, rv string) error {
	return a.watch(ctx, c, t, o, client.Table, rv, func(raw json.RawMessage) error {
		var tab metav1.Table
		if err := json.Unmarshal(raw, &tab); err != nil {
			return fmt.Errorf("read watch event: %w", err)
		}
		return w.print(&tab)
	})
}

// watch hands on what changes after rv, until the server or the user ends it.
func (a *app) watch(ctx context.Context, c *client.Client, t target, o getOptions, accept, rv string, f func(json.RawMessage) error) error {
	q := o.query()
	path := t.res.Path(o.namespace(c), "")
	if len(t.names) == 1 {
		q.Set("fieldSelector", "metadata.name="+t.names[0])
		path = t.res.Path(c.Namespace, "")
	} else if len(t.names) > 1 {
		return usagef("one name, or none, can be watched")
	}
	q.Set("resourceVersion", rv)
	err := c.Watch(ctx, path, q, accept, func(typ string, raw json.RawMessage) (bool, error) {
		if typ == "BOOKMARK" {
			return true, nil
		}
		return true, f(raw)
	})
	if errors.Is(err, io.EOF) || errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

func (a *app) getObjects(ctx context.Context, c *client.Client, ts []target, o getOptions) error {
	items := []any{}
	var rv string
	var misses missed
	single := false
	for _, t := range ts {
		for _, n := range t.names {
			u, err := c.Object(ctx, t.res.Path(c.Namespace, n))
			if err != nil {
				if err := misses.note(err); err != nil {
					return err
				}
				continue
			}
			items, rv = append(items, u.Object), u.GetResourceVersion()
			single = len(ts) == 1 && len(t.names) == 1
		}
		if len(t.names) > 0 {
			continue
		}
		var l struct {
			Metadata metav1.ListMeta  `json:"metadata"`
			Items    []map[string]any `json:"items"`
		}
		if err := c.JSON(ctx, client.Request{Method: http.MethodGet, Path: t.res.Path(o.namespace(c), ""), Query: o.query()}, &l); err != nil {
			return err
		}
		rv = l.Metadata.ResourceVersion
		for _, m := range l.Items {
			m["apiVersion"], m["kind"] = t.res.GVK.GroupVersion().String(), t.res.GVK.Kind
			items = append(items, m)
		}
	}
	if o.order != nil {
		index, err := o.order.sorted(items)
		if err != nil {
			return err
		}
		unsorted := items
		items = make([]any, len(index))
		for to, from := range index {
			items[to] = unsorted[from]
		}
	}
	if !o.watch {
		if len(items) == 0 && len(misses) > 0 {
			return misses.end(a)
		}
		return errors.Join(a.printObjects(ts, o, items, single), misses.end(a))
	}
	if len(misses) > 0 {
		return misses.end(a)
	}
	// Each object by itself, from the first on.
	for _, i := range items {
		if err := a.printObjects(ts, o, []any{i}, true); err != nil {
			return err
		}
	}
	return a.watch(ctx, c, ts[0], o, client.JSON, rv, func(raw json.RawMessage) error {
		var m map[string]any
		if err := json.Unmarshal(raw, &m); err != nil {
			return fmt.Errorf("read watch event: %w", err)
		}
		return a.printObjects(ts, o, []any{m}, true)
	})
}

// printObjects prints one object, or a list of them, as -o says.
func (a *app) printObjects(ts []target, o getOptions, items []any, single bool) error {
	if o.output == "name" {
		for _, i := range items {
			m, _ := i.(map[string]any)
			u := &unstructured.Unstructured{Object: m}
			a.printf("%s/%s\n", nameOf(ts, u), u.GetName())
		}
		return nil
	}
	var v any = map[string]any{"apiVersion": "v1", "kind": "List", "items": items}
	if single {
		v = items[0]
	}
	if o.template == nil {
		if o.watch && o.output == "yaml" {
			a.printf("---\n")
		}
		return a.marshal(v, o.output)
	}
	if err := execute(a.out, o.template, v); err != nil {
		return err
	}
	if o.watch {
		a.printf("\n")
	}
	return nil
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
