package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/dunlin-project/dunlin/cli/client"
	"github.com/dunlin-project/dunlin/controlplane/scheduler"
)

func (a *app) explainCmd() *cobra.Command {
	var output string
	c := &cobra.Command{
		Use:   "explain pod NAME",
		Short: "Say of every node why a pod can or cannot run there",
		Long: `Say of every node why a pod can or cannot run there.

Every filter of the scheduler is asked about every node, as things are now,
with figures: what the pod needs, what is free, and who holds most of the rest.`,
		Example: `  dunlin explain pod big-7f9c
  dunlin explain pod/big-7f9c -n shop -o json`,
		Args: cobra.RangeArgs(1, 2),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
			if len(args) == 0 {
				return []string{"pod"}, cobra.ShellCompDirectiveNoFileComp
			}
			return a.completePods(cmd, args[1:], prefix)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if output != "" && output != "json" {
				return usagef("-o %s: only json is known, or nothing for a table", output)
			}
			kind, name, _ := strings.Cut(strings.Join(args, "/"), "/")
			switch kind {
			case "pod", "pods", "po":
			default:
				return usagef("%s: only pods are explained, as in 'dunlin explain pod NAME'", kind)
			}
			if name == "" || strings.Contains(name, "/") {
				return usagef("which pod? as in 'dunlin explain pod NAME'")
			}
			return a.explain(cmd.Context(), name, output)
		},
	}
	c.Flags().StringVarP(&output, "output", "o", "", "json, or a table")
	return a.namespaced(c)
}

func (a *app) explain(ctx context.Context, name, output string) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	var p scheduler.Placement
	if err := c.JSON(ctx, client.Request{Method: http.MethodGet, Path: podPath(c.Namespace, name) + "/placement"}, &p); err != nil {
		return err
	}
	if output == "json" {
		b, err := json.MarshalIndent(&p, "", "  ")
		if err != nil {
			return fmt.Errorf("print: %w", err)
		}
		a.printf("%s\n", b)
		return nil
	}
	a.printf("Pod %s/%s: %s\n", p.Namespace, p.Pod, p.Message)
	if p.Nominated != "" && p.Node == "" {
		a.printf("Room is being made on node %s.\n", p.Nominated)
	}
	if len(p.Nodes) == 0 {
		return nil
	}
	a.printf("\n")
	w := tabwriter.NewWriter(a.out, 0, 4, 3, ' ', 0)
	_, _ = fmt.Fprintln(w, "NODE\tFILTER\tREASON")
	for i := range p.Nodes {
		for _, row := range explainRows(&p.Nodes[i]) {
			_, _ = fmt.Fprintln(w, strings.Join(row, "\t"))
		}
	}
	return w.Flush()
}

// explainRows are a node's objections, or that there is none.
func explainRows(n *scheduler.NodePlacement) (rows [][]string) {
	if n.Fits {
		return [][]string{{n.Name, "-", "fits"}}
	}
	for i := range n.Filters {
		f := &n.Filters[i]
		if f.OK {
			continue
		}
		if len(f.Figures) == 0 {
			rows = append(rows, []string{n.Name, f.Name, f.Reason + held(f.HeldBy)})
			continue
		}
		for _, x := range f.Figures {
			if x.Short {
				rows = append(rows, []string{n.Name, f.Name, fmt.Sprintf("%s: needs %s, free %s of %s%s", x.Resource, x.Needs, x.Free, x.Of, held(x.HeldBy))})
			}
		}
	}
	return rows
}

func held(by []string) string {
	if len(by) == 0 {
		return ""
	}
	return "; held by " + strings.Join(by, ", ")
}
