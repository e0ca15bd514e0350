package cli

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"text/tabwriter"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/dunlin-project/dunlin/cli/client"
)

// usedBy is one object of metrics.k8s.io/v1beta1.
type usedBy struct {
	Metadata struct {
		Name      string `json:"name"`
		Namespace string `json:"namespace"`
	} `json:"metadata"`
	Usage      corev1.ResourceList `json:"usage"`
	Containers []struct {
		Usage corev1.ResourceList `json:"usage"`
	} `json:"containers"`
}

// total is what the object uses, its containers together.
func (u *usedBy) total() (cpu, memory resource.Quantity) {
	cpu, memory = u.Usage.Cpu().DeepCopy(), u.Usage.Memory().DeepCopy()
	for _, c := range u.Containers {
		cpu.Add(*c.Usage.Cpu())
		memory.Add(*c.Usage.Memory())
	}
	return cpu, memory
}

func (a *app) topCmd() *cobra.Command {
	c := &cobra.Command{
		Use:     "top nodes|pods [NAME]",
		Short:   "Show what nodes or pods use of CPU and memory now",
		Long:    "Show what nodes or pods use of CPU and memory now. Nodes are asked when somebody\nlooks; one that is away, and pods that do not run, are left out.\n\nA node's figures are its whole machine's, the programs beside Dunlin included; of\na node with --node-memory both are of its pods alone. The shares are of what the\nnode has for pods.",
		Example: "  dunlin top nodes\n  dunlin top pods -A --sort-by memory",
		Args:    cobra.NoArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	var sortBy string
	var all bool
	sub := func(use, alias, short string, run func(context.Context, *client.Client, string) error) *cobra.Command {
		s := &cobra.Command{Use: use + " [NAME]", Aliases: []string{alias}, Short: short, Args: cobra.MaximumNArgs(1), RunE: func(cmd *cobra.Command, args []string) error {
			if sortBy != "" && sortBy != "cpu" && sortBy != "memory" {
				return usagef("--sort-by=%s: cpu and memory are known", sortBy)
			}
			cl, err := a.client()
			if err != nil {
				return err
			}
			return run(cmd.Context(), cl, append(args, "")[0])
		}}
		s.Flags().StringVar(&sortBy, "sort-by", "", "cpu or memory, the largest first (default: by name)")
		c.AddCommand(s)
		return s
	}
	sub("nodes", "node", "What nodes use", func(ctx context.Context, cl *client.Client, name string) error {
		return a.topNodes(ctx, cl, name, sortBy)
	})
	pods := sub("pods", "pod", "What pods use", func(ctx context.Context, cl *client.Client, name string) error {
		return a.topPods(ctx, cl, name, sortBy, all)
	})
	pods.Flags().BoolVarP(&all, "all-namespaces", "A", false, "of all namespaces")
	a.namespaced(pods)
	return c
}

// used reads one object's usage, or all of a path.
func used(ctx context.Context, c *client.Client, path, name, sortBy string) ([]usedBy, error) {
	path = "/apis/metrics.k8s.io/v1beta1" + path
	var out []usedBy
	if name != "" {
		var u usedBy
		if err := c.JSON(ctx, client.Request{Method: http.MethodGet, Path: path + "/" + url.PathEscape(name)}, &u); err != nil {
			return nil, err
		}
		out = append(out, u)
	} else {
		var l struct {
			Items []usedBy `json:"items"`
		}
		if err := c.JSON(ctx, client.Request{Method: http.MethodGet, Path: path}, &l); err != nil {
			return nil, err
		}
		out = l.Items
	}
	slices.SortFunc(out, func(x, y usedBy) int {
		by := 0
		xc, xm := x.total()
		yc, ym := y.total()
		switch sortBy {
		case "cpu":
			by = yc.Cmp(xc)
		case "memory":
			by = ym.Cmp(xm)
		}
		return cmp.Or(by, cmp.Compare(x.Metadata.Namespace, y.Metadata.Namespace), cmp.Compare(x.Metadata.Name, y.Metadata.Name))
	})
	return out, nil
}

func milliText(q resource.Quantity) string { return strconv.FormatInt(q.MilliValue(), 10) + "m" }

func mibText(q resource.Quantity) string { return strconv.FormatInt(q.Value()>>20, 10) + "Mi" }

func shareText(part, whole int64) string {
	if whole <= 0 {
		return "<unknown>"
	}
	return strconv.FormatInt(part*100/whole, 10) + "%"
}

func (a *app) topNodes(ctx context.Context, c *client.Client, name, sortBy string) error {
	list, err := used(ctx, c, "/nodes", name, sortBy)
	if err != nil {
		return err
	}
	var nodes corev1.NodeList
	if err := c.JSON(ctx, client.Request{Method: http.MethodGet, Path: "/api/v1/nodes"}, &nodes); err != nil {
		return err
	}
	w := tabwriter.NewWriter(a.out, 0, 4, 3, ' ', 0)
	_, _ = fmt.Fprintln(w, "NAME\tCPU(cores)\tCPU%\tMEMORY(bytes)\tMEMORY%")
	for i := range list {
		cpu, memory := list[i].total()
		var have corev1.ResourceList
		for j := range nodes.Items {
			if nodes.Items[j].Name == list[i].Metadata.Name {
				have = nodes.Items[j].Status.Allocatable
			}
		}
		_, _ = fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", list[i].Metadata.Name, milliText(cpu), shareText(cpu.MilliValue(), have.Cpu().MilliValue()),
			mibText(memory), shareText(memory.Value(), have.Memory().Value()))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if away := len(nodes.Items) - len(list); name == "" && away > 0 {
		a.notef("%d of %d nodes do not answer\n", away, len(nodes.Items))
	}
	return nil
}

func (a *app) topPods(ctx context.Context, c *client.Client, name, sortBy string, all bool) error {
	path := "/namespaces/" + url.PathEscape(c.Namespace) + "/pods"
	if all {
		if name != "" {
			return usagef("a pod's name and --all-namespaces do not go together")
		}
		path = "/pods"
	}
	list, err := used(ctx, c, path, name, sortBy)
	if err != nil {
		return err
	}
	w := tabwriter.NewWriter(a.out, 0, 4, 3, ' ', 0)
	head := "NAME\tCPU(cores)\tMEMORY(bytes)"
	if all {
		head = "NAMESPACE\t" + head
	}
	_, _ = fmt.Fprintln(w, head)
	for i := range list {
		cpu, memory := list[i].total()
		line := fmt.Sprintf("%s\t%s\t%s\n", list[i].Metadata.Name, milliText(cpu), mibText(memory))
		if all {
			line = list[i].Metadata.Namespace + "\t" + line
		}
		_, _ = fmt.Fprint(w, line)
	}
	return w.Flush()
}
