package cli

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/dunlin-project/dunlin/cli/client"
)

func (a *app) apiResourcesCmd() *cobra.Command {
	return &cobra.Command{
		Use:     "api-resources",
		Short:   "List the kinds that the server serves",
		Example: `  dunlin api-resources`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			all, err := c.Resources(cmd.Context())
			if err != nil {
				return err
			}
			return a.printResources(all)
		},
	}
}

// printResources has the columns of kubectl api-resources.
func (a *app) printResources(all []client.Resource) error {
	slices.SortStableFunc(all, func(x, y client.Resource) int {
		return cmp.Or(cmp.Compare(x.GVK.Group, y.GVK.Group), cmp.Compare(x.Name, y.Name))
	})
	w := tabwriter.NewWriter(a.out, 0, 4, 3, ' ', 0)
	_, _ = fmt.Fprintln(w, "NAME\tSHORTNAMES\tAPIVERSION\tNAMESPACED\tKIND")
	for _, r := range all {
		_, _ = fmt.Fprintf(w, "%s\t%s\t%s\t%v\t%s\n", r.Name, strings.Join(r.ShortNames, ","), r.GVK.GroupVersion(), r.Namespaced, r.GVK.Kind)
	}
	return w.Flush()
}
